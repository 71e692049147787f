#!/usr/bin/env bash
# What tools.bench.gpu needs on a machine that has PyTorch but no package index, as a bundle of small files.
#
#   tools/bench/pack_gpu.sh pack PARTS             with an index: writes PARTS/bundle.tar.xz.aa, .ab, ... and their checksums
#   tools/bench/pack_gpu.sh unpack PARTS SITE      on the other machine: unpacks them into SITE and imports each package
#   PYTHONPATH=SITE python3 -m tools.bench.gpu     there, in the repository
#
# The bundle holds what pyproject.toml requires, without what PRESENT installs, and of DALI what decodes JPEGs on one kind
# of GPU: one part of 56 MB. tools/README.md has the commands for a GPU that is lent for a quarter of an hour.
# Environment variables:
#   PYTHON_VERSION=3.12            of the other machine
#   PRESENT="torch==2.11.* ..."    what is installed there
#   ARCH=90                        the GPU's compute capability, 9.0: machine code for others is left out; all: none is
#   DALI="==2.4.0"                 the version of DALI; where decoding boxes crashes, DALI="==2.2.0"
#   EXTRA=""                       more requirements, such as "nvidia-nvimgcodec-cu13==0.8.0.22" for DALI 2.2
#   PART_BYTES=60000000            size of a part
#   PHOTOS=FILE                    a tar of ImageNet's images, of which 200 go into PARTS/photos.tar, for --archive
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
repository=$(cd "$(dirname "$0")/../.." && pwd)

pack() {
    local out=$1 version=${PYTHON_VERSION:-3.12} photos=
    if [ -n "${PHOTOS:-}" ]; then photos=$(realpath -e "$PHOTOS"); fi
    work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
    mkdir -p "$out" "$work/site" "$work/wheels"
    local target=(--quiet --disable-pip-version-check --only-binary=:all: --implementation cp --python-version "$version")
    for minor in $(seq 39 -1 5); do target+=(--platform "manylinux_2_${minor}_x86_64"); done
    target+=(--platform manylinux2014_x86_64 --platform linux_x86_64)
    read -ra present <<<"${PRESENT:-torch==2.11.* torchvision timm tqdm psutil pytest pytest-xdist pytest-timeout scikit-learn \
        matplotlib onnxruntime cloudpickle wheel}"
    read -ra extra <<<"${EXTRA:-} six"  # astunparse needs it, and nothing that is present may bring it
    # tfrecord is for the project's tests, and its wheels are older than today's protobuf.
    mapfile -t required < <(DALI=${DALI:-} python3 -c '
import os, tomllib
for line in tomllib.load(open("'"$repository"'/pyproject.toml", "rb"))["project"]["dependencies"]:
    if not line.startswith("tfrecord"):
        print("nvidia-dali-cuda130" + os.environ["DALI"] if "nvidia-dali" in line and os.environ["DALI"] else line)')

    versions() {  # of everything that the requirements install, one NAME==VERSION a line
        python3 -m pip install "${target[@]}" --dry-run --ignore-installed --target "$work/none" --report - "$@" | python3 -c '
import json, sys
for package in json.load(sys.stdin)["install"]:
    print("{name}=={version}".format(**package["metadata"]))' | sort
    }
    versions "${required[@]}" "${extra[@]}" "${present[@]}" >"$work/all"
    # timm is packed even where it is present: the models and LAMB must be those of a known version.
    versions "${present[@]}" | grep -v '^timm==' | sed 's/==.*/==/' >"$work/present"
    grep -v --fixed-strings --file="$work/present" "$work/all" >"$work/missing"
    echo "packing for Python $version:" $(<"$work/missing")
    python3 -m pip download "${target[@]}" --no-deps --dest "$work/wheels" --requirement "$work/missing"
    for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
    cd "$work/site"
    # Not needed to run: code for other Pythons, headers, static libraries, other image formats, DALI's dynamic mode, other
    # GPUs' code, symbols.
    find . -name '*.cpython-*.so' ! -name "*.cpython-${version/./}-*" -delete
    find . -type f \( -name '*.h' -o -name '*.hpp' -o -name '*.cuh' -o -name '*.a' -o -name '*.cu' -o -name '*.cc' \) -delete
    rm -rf nvidia/{nvtiff,nvjpeg2k,libnvcomp} libcst{,-*} makefun{,-*} nvidia_dali_*.data nvidia/nvimgcodec/tools
    rm -f nvidia/nvimgcodec/extensions/lib{nvjpeg2k,nvtiff,tiff,opencv}_ext.so*
    # Some wheels have an empty one, which would hide the packages nvidia.* that torch has brought.
    echo '__path__ = __import__("pkgutil").extend_path(__path__, __name__)' >nvidia/__init__.py
    [ "${ARCH:-90}" = all ] || python3 "$repository/tools/bench/slim.py" "${ARCH:-90}" .
    cp "$work/missing" packed.txt
    rm -f "$out"/bundle.tar.xz.*
    tar --sort=name --owner=0 --group=0 -c . | xz -T0 --x86 --lzma2=preset=6,dict=32MiB | split -b "${PART_BYTES:-60000000}" - "$out/bundle.tar.xz."
    (cd "$out" && sha256sum bundle.tar.xz.?? >bundle.tar.xz.sha256 && ls -l)
    if [ -n "$photos" ]; then
        tar -tf "$photos" | grep -i '\.jpeg$' | shuf -n 200 --random-source="$photos" >"$work/photos"
        mkdir "$work/images" && tar -xf "$photos" -C "$work/images" -T "$work/photos"
        tar -cf "$out/photos.tar" -C "$work/images" -T "$work/photos"
    fi
}

case "${1:-}" in
    pack) [ $# = 2 ] || usage; pack "$(realpath -m "$2")" ;;
    unpack) [ $# = 3 ] || usage; exec "${PYTHON:-python3}" "$repository/tools/bench/unpack_gpu.py" "$2" "$3" ;;
    *) usage ;;
esac
