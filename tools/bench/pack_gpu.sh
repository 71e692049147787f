#!/usr/bin/env bash
# Everything that tools.bench.gpu needs on a machine that has PyTorch but reaches no package index, as a bundle of small files.
#
#   tools/bench/pack_gpu.sh pack PARTS             here, with an index: writes PARTS/bundle.tar.xz.aa, .ab, ... and checksums
#   tools/bench/pack_gpu.sh unpack PARTS SITE      there: checks them, unpacks into SITE and imports every package
#   PYTHONPATH=SITE python3 -m tools.bench.gpu     there, in the repository
#
# What is packed: whatever pyproject.toml requires, and what that requires in turn, without what the packages in PRESENT bring.
# Settings, by environment variable:
#   PYTHON_VERSION=3.12       of the machine there
#   PRESENT="torch==2.11.* ..."   what is installed there
#   DALI="==2.4.0"            the version of DALI; where decoding boxes crashes: DALI="==2.2.0" EXTRA="nvidia-nvimgcodec-cu13==0.8.0.22"
#   EXTRA=""                  more requirements
#   PART_BYTES=56000000       size of a part
#   PHOTOS=FILE               a tar of ImageNet's images: 200 of them go into PARTS/photos.tar, for --archive there
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
repository=$(cd "$(dirname "$0")/../.." && pwd)

pack() {
    local out=$1 version=${PYTHON_VERSION:-3.12} photos=${PHOTOS:+$(realpath "$PHOTOS")}
    work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
    mkdir -p "$out" "$work/site" "$work/wheels"
    local target=(--quiet --disable-pip-version-check --only-binary=:all: --implementation cp --python-version "$version")
    for minor in $(seq 39 -1 5); do target+=(--platform "manylinux_2_${minor}_x86_64"); done
    target+=(--platform manylinux2014_x86_64 --platform linux_x86_64)

    read -ra present <<<"${PRESENT:-torch==2.11.* torchvision timm tqdm psutil pytest scipy matplotlib onnxruntime}"
    read -ra extra <<<"${EXTRA:-} pytest-xdist pytest-timeout"  # after a test that crashes or hangs the others run
    mapfile -t required < <(DALI=${DALI:-} python3 - "$repository/pyproject.toml" <<'PYTHON'
import os, sys, tomllib
for line in tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]:
    if line.startswith("tfrecord"):
        continue  # only the project's tests use it, and its wheels are older than today's protobuf
    print("nvidia-dali-cuda130" + os.environ["DALI"] if line.startswith("nvidia-dali") and os.environ["DALI"] else line)
PYTHON
)
    python3 -m pip install "${target[@]}" --dry-run --ignore-installed --target "$work/none" --report "$work/report.json" \
        "${required[@]}" "${extra[@]}" "${present[@]}"
    python3 - "$work/report.json" "$version" "${present[@]}" >"$work/missing" <<'PYTHON'
import json, re, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name as canonical

report, version, *present = sys.argv[1:]
found = {canonical(p["metadata"]["name"]): p["metadata"] for p in json.load(open(report))["install"]}
environment = {"python_version": version, "python_full_version": version + ".0", "extra": ""}
there, queue = set(), [Requirement(line) for line in present]
while queue:
    requirement = queue.pop()
    name = canonical(requirement.name)
    if (name, *requirement.extras) in there or name not in found:
        continue
    there.add((name, *requirement.extras))
    for line in found[name].get("requires_dist", []):
        needed = Requirement(line)
        extras = [*requirement.extras, ""]
        if needed.marker is None or any(needed.marker.evaluate({**environment, "extra": extra}) for extra in extras):
            queue.append(needed)
names = {name for name, *_ in there} - {"timm"}  # of a known version: LAMB and the models' layers are its own
for name, metadata in sorted(found.items()):
    if name not in names:
        print(f"{metadata['name']}=={metadata['version']}")
PYTHON
    echo "packing for Python $version:" $(<"$work/missing")
    python3 -m pip download "${target[@]}" --no-deps --dest "$work/wheels" --requirement "$work/missing"
    for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
    cd "$work/site"
    # Not needed to run: code for other Pythons, headers, static libraries.
    find . -name '*.cpython-*.so' ! -name "*.cpython-${version/./}-*" -delete
    find . \( -name '*.h' -o -name '*.hpp' -o -name '*.cuh' -o -name '*.a' -o -name '*.cu' -o -name '*.cc' \) -type f -delete
    rm -rf nvidia/nvtiff nvidia/nvjpeg2k nvidia/libnvcomp libcst libcst-*  # other image formats, autograph's parser of types
    find nvidia/dali -maxdepth 1 -name 'libdali*.so' -exec strip --strip-unneeded {} + || true  # symbols are a third of it
    cp "$work/missing" packed.txt
    rm -f "$out"/bundle.tar.xz.*
    tar --sort=name --owner=0 --group=0 -c . | xz -T0 -6 | split -b "${PART_BYTES:-56000000}" - "$out/bundle.tar.xz."
    (cd "$out" && sha256sum bundle.tar.xz.?? >bundle.tar.xz.sha256)
    if [ -n "$photos" ]; then
        mkdir "$work/photos"
        tar -tf "$photos" | grep -i '\.jpeg$' | shuf -n 200 --random-source="$photos" >"$work/chosen"
        tar -xf "$photos" -C "$work/photos" -T "$work/chosen"
        find "$work/photos" -type f -printf '%P\n' | sort | tar -cf "$out/photos.tar" -C "$work/photos" -T -
    fi
    ls -l "$out"
}

unpack() {
    local parts=$1 site=$2
    (cd "$parts" && sha256sum --check --quiet bundle.tar.xz.sha256)
    mkdir -p "$site"
    cat "$parts"/bundle.tar.xz.?? | tar -xJ -C "$site"
    echo "unpacked $(wc -l <"$site/packed.txt") packages into $site; importing them:"
    PYTHONPATH="$site:$repository" "${PYTHON:-python3}" - <<'PYTHON'
import importlib, sys

failed = 0
for module in (
    "torch torchvision timm tqdm psutil pytest scipy.io numpy PIL nvidia.dali nvidia.dali.fn nvidia.dali.plugin.pytorch "
    "nvidia.nvimgcodec crc32c xdist dali_train.cli dali_train.commands.train"
).split():
    try:  # one that fails must not hide the next
        importlib.import_module(module)
        print(f"  ok    {module}")
    except Exception as error:
        print(f"  FAIL  {module}: {type(error).__name__}: {error}")
        failed = 1
sys.exit(failed)
PYTHON
}

case "${1:-}" in
    pack) [ $# = 2 ] || usage; pack "$(realpath -m "$2")" ;;
    unpack) [ $# = 3 ] || usage; unpack "$(realpath "$2")" "$(realpath -m "$3")" ;;
    *) usage ;;
esac
