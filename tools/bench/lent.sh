#!/usr/bin/env bash
# One call to a GPU machine that is lent for 15 minutes, has PyTorch and reaches nothing: tools/README.md.
#
#   tools/bench/lent.sh 1 COMMIT    unpack .gpu/bundle.tar.xz.*; are the GPU's images and training right; the model alone
#   tools/bench/lent.sh 2 COMMIT    with .gpu/photos.tar, .gpu/cifar10-jpeg.tar.gz, .gpu/airbench94.py: everything that reads
#
# It leaves the report and its own output in $OUT. Environment variables:
#   OPTIONS=""        more options of tools.bench.gpu; "--device cpu --quick" for a rehearsal
#   SECONDS_1=300     after which a first call begins no more parts; SECONDS_2=420 a second one
set -uo pipefail
call=$1 commit=$2 kept=${TMPDIR:-/tmp}/dali-train-lent carried=.gpu options=()
site=$kept/site

measure() {
    nvidia-smi; nproc; free -g; df -h /tmp /dev/shm; python3 -V; command -v gcc g++ nvcc xz
    ldconfig -p | grep -E 'nvcuvid|nvjpeg|libcuda\.|nvidia-ml'  # without nvcuvid nvJPEG has no hardware decoder
    if [ ! -e "$site/packed.txt" ] && [ ! -e "$carried/bundle.tar.xz.sha256" ]; then
        echo "neither $site nor $carried has the bundle: this machine is a new one, begin with call 1"
        return 2
    fi
    # What an earlier bundle left is not mixed with this one.
    if [ -e "$carried/bundle.tar.xz.sha256" ] && ! cmp -s "$carried/bundle.tar.xz.sha256" "$site/bundle.tar.xz.sha256"; then
        rm -rf "$site"
        # Meanwhile torch comes from the disk, and the GPU's context is made.
        python3 -c 'import torch, timm; torch.cuda.is_available() and torch.ones(1).cuda()' &
        python3 tools/bench/unpack_gpu.py "$carried" "$site" && cp "$carried/bundle.tar.xz.sha256" "$site"
        wait
    fi
    if [ "$call" = 1 ]; then
        options+=(--seconds "${SECONDS_1:-300}" --parts machine parity model-)
    else
        options+=(--seconds "${SECONDS_2:-420}" --archive "$carried/photos.tar")
        [ -e "$carried/cifar10-jpeg.tar.gz" ] && options+=(--cifar10 "$carried/cifar10-jpeg.tar.gz")
        [ -e "$carried/airbench94.py" ] && options+=(--program "$carried/airbench94.py")
    fi
    # The report is kept between calls outside the repository, which each call lays anew.
    PYTHONPATH=$site python3 -m tools.bench.gpu --minutes 15 --out "$kept/measured" --copy "$OUT" --commit "$commit" \
        "${options[@]}" ${OPTIONS:-}
}

measure 2>&1 | tee "$OUT/call-$call.log"
