"""Writes the Serve config and the job's runtime env into the KubeRay manifests beside this file.

    python infra/kuberay/render.py            # after a change of serve_configs/ or jobs/runtime_env.yaml
    python infra/kuberay/render.py --check    # changes nothing; exit status 1 when a manifest is out of date

KubeRay takes both as strings inside its own YAML. Copied by hand they would drift from the files that run elsewhere.
They are taken as they stand but for one address: see `for_a_pod`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

EMBEDDED = {
    "rayservice.yaml": ("serveConfigV2", ROOT / "serve_configs/2-autoscaled.yaml"),
    "rayjob.yaml": ("runtimeEnvYAML", ROOT / "jobs/runtime_env.yaml"),
}
"""manifest: (its key, the file whose text is that key's value)."""


def for_a_pod(serve_config: str) -> str:
    """The Serve config with its proxy on the pod's network: on a pod's loopback no Kubernetes Service could reach it.

    Raises:
        ValueError: the config does not bind to 127.0.0.1 in exactly one place.
    """
    found = serve_config.count("host: 127.0.0.1")
    if found != 1:
        raise ValueError(f"expected one `host: 127.0.0.1` in the Serve config, found {found}")
    return serve_config.replace("host: 127.0.0.1", "host: 0.0.0.0")


def embed(manifest: str, key: str, text: str) -> str:
    """`manifest` with `text` as the block scalar under `key`.

    Raises:
        ValueError: the manifest has no line `key: |`, or more than one.
    """
    lines = manifest.splitlines()
    starts = [i for i, line in enumerate(lines) if re.fullmatch(rf"\s*{key}: \|", line)]
    if len(starts) != 1:
        raise ValueError(f"expected one line `{key}: |`, found {len(starts)}")
    start = starts[0]
    indent = len(lines[start]) - len(lines[start].lstrip()) + 2
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" " * indent)):
        end += 1
    block = [" " * indent + line if line.strip() else "" for line in text.strip("\n").splitlines()]
    return "\n".join([*lines[: start + 1], *block, *lines[end:]]) + "\n"


def main() -> int:
    """Renders or checks every manifest; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="report what is out of date and change nothing")
    check = parser.parse_args().check
    stale = 0
    for name, (key, source) in EMBEDDED.items():
        path = HERE / name
        before = path.read_text()
        text = source.read_text()
        after = embed(before, key, for_a_pod(text) if key == "serveConfigV2" else text)
        if after == before:
            continue
        stale += 1
        if not check:
            path.write_text(after)
        print(f"{name}: {key} {'differs from' if check else 'written from'} {source.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
