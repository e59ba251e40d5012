"""The MLflow flavour of a drafter: its checkpoint folder beside an MLmodel file. Nothing is pickled.

MLmodel
checkpoint/config.json  checkpoint/model.safetensors  checkpoint/manifest.json
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from eaglenest.drafters.checkpoint import CONFIG, MANIFEST, WEIGHTS, verify_checkpoint
from eaglenest.errors import CheckpointError

FLAVOR_NAME = "eaglenest"
CHECKPOINT = "checkpoint"


def save_model(checkpoint_dir: Path, path: Path, mlflow_model: Any = None) -> None:
    """Write an MLflow model folder.

    Args:
        checkpoint_dir: a sound checkpoint.
        path: the folder to make; it must not exist.
        mlflow_model: an `mlflow.models.Model` to complete, when its run and id are known.

    Raises:
        CheckpointError: the checkpoint is not sound.
    """
    from mlflow.models import Model

    manifest = verify_checkpoint(checkpoint_dir)
    (path / CHECKPOINT).mkdir(parents=True)
    for name in (CONFIG, WEIGHTS, MANIFEST):
        shutil.copyfile(checkpoint_dir / name, path / CHECKPOINT / name)
    model = Model() if mlflow_model is None else mlflow_model
    model.add_flavor(
        FLAVOR_NAME,
        checkpoint=CHECKPOINT,
        eaglenest_version=manifest.eaglenest_version,
        architecture=manifest.architecture_signature,
        target=manifest.target_name,
        target_fingerprint=manifest.target_fingerprint,
    )
    model.save(str(path / "MLmodel"))


def load_model(model_uri: str, dst_path: str | None = None) -> Path:
    """The verified checkpoint folder of a model of this flavour.

    Args:
        model_uri: a local folder, or any URI that MLflow, as it is configured in this process, can download. To serve a
            version use `Registry.download`, which also holds it to the digest that the registry has.
        dst_path: where to download to; by default a temporary folder.

    Raises:
        CheckpointError: another flavour, or an unsound checkpoint.
    """
    from mlflow.artifacts import download_artifacts
    from mlflow.models import Model

    folder = Path(download_artifacts(artifact_uri=str(model_uri), dst_path=dst_path))
    flavors = Model.load(str(folder)).flavors
    if FLAVOR_NAME not in flavors:
        raise CheckpointError(f"{model_uri} has the flavours {sorted(flavors)}", f"the flavour {FLAVOR_NAME}")
    verify_checkpoint(folder / CHECKPOINT)
    return folder / CHECKPOINT
