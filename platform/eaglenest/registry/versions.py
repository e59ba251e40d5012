"""Drafter versions in MLflow's model registry: registered, resolved, downloaded, promoted, rolled back.

The registry is the desired state: the alias `champion` names what is served. MLflow moves one alias per call, so a
promotion is two calls, `previous_champion` first: whoever looks in between finds the old champion in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from eaglenest.errors import RegistryError
from eaglenest.registry.client import talking_to
from eaglenest.registry.describe import FIGURES, description, figure_tags
from eaglenest.registry.transfer import fetch_version, upload_version
from eaglenest.settings import shown

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous_champion"


class DrafterVersion(BaseModel):
    """One version of the registered model, as the registry had it when asked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_name: str
    version: int
    aliases: tuple[str, ...]
    tags: dict[str, str]
    run_id: str | None
    source: str
    status: str
    created_at: str
    description: str

    @property
    def model_id(self) -> str | None:
        """The logged model that holds its files; MLflow's SQL store keeps it only in the source."""
        return self.source.removeprefix("models:/") if self.source.startswith("models:/m-") else None

    @property
    def figures(self) -> dict[str, Any]:
        """Everything measured of it."""
        figures: dict[str, Any] = json.loads(self.tags.get(FIGURES, "{}"))
        return figures

    @property
    def target_fingerprint(self) -> str | None:
        """The target it was distilled from."""
        return self.tags.get("target_fingerprint")

    @property
    def architecture(self) -> str | None:
        """Its architecture signature: versions with equal ones may be swapped."""
        return self.tags.get("architecture")


class Registry:
    """One registered model on one MLflow server. Nothing is cached: each method asks the server.

    Every method raises `RegistryError`, within seconds, when the server cannot be reached.

    Args:
        tracking_uri: http(s) URI of the MLflow server.
        model_name: the registered model; made at the first registration.
    """

    def __init__(self, tracking_uri: str, model_name: str) -> None:
        self.tracking_uri, self.model_name = tracking_uri.rstrip("/"), model_name

    def ensure_ready(self) -> None:
        """Ask the server whether it answers.

        Raises:
            RegistryError: it does not, within `client.PROBE_SECONDS`.
        """
        with talking_to(self.tracking_uri, "answer"):
            pass

    def register(
        self,
        checkpoint_dir: Path,
        *,
        run_id: str,
        figures: Mapping[str, Any],
        parent_version: int | None = None,
        plots: Iterable[Path] = (),
        alias: str | None = CHALLENGER,
        extra_tags: Mapping[str, str] | None = None,
    ) -> DrafterVersion:
        """Make a checkpoint the next version.

        Args:
            run_id: the MLflow run that made it.
            figures: what was measured, single values or tables; added to the manifest's.
            parent_version: the version it was distilled further from; by default the manifest's.
            plots: files to keep with the run.
            alias: to move to the new version; None moves none.

        Raises:
            CheckpointError: the folder is no sound checkpoint; nothing is registered then.
            RegistryError: no such run or parent.
        """
        uploaded = upload_version(
            self.tracking_uri,
            self.model_name,
            Path(checkpoint_dir),
            run_id=run_id,
            figures=figures,
            parent_version=parent_version,
            plots=plots,
            extra_tags=extra_tags or {},
        )
        with self._client(f"describe version {uploaded}") as client:
            self._describe(client, uploaded)
            if alias is not None:
                client.set_registered_model_alias(self.model_name, alias, str(uploaded))
            return self._of(client.get_model_version(self.model_name, str(uploaded)))

    def resolve(self, ref: str | int) -> DrafterVersion:
        """A version by its number, or the one an alias names now.

        Raises:
            RegistryError: there is no such version or alias.
        """
        text = str(ref)
        if text.isdecimal():
            missing = self._missing(f"no version {text}")
            with self._client(f"find version {text}", missing=missing) as client:
                return self._of(client.get_model_version(self.model_name, text))
        missing = self._missing(f"no alias {text}")
        with self._client(f"resolve {text}", missing=missing) as client:
            from mlflow.exceptions import MlflowException

            try:
                return self._of(client.get_model_version_by_alias(self.model_name, text))
            except MlflowException as error:
                if error.error_code == "INVALID_PARAMETER_VALUE":  # MLflow's word for an alias that is not there
                    raise missing from None
                raise

    def versions(self) -> list[DrafterVersion]:
        """Every version, the newest first; none when the registered model is not there yet."""
        with self._client("list the versions") as client:
            aliases = self._aliases(client)
            found: list[Any] = []
            token: str | None = None
            while token != "":
                page = client.search_model_versions(f"name='{self.model_name}'", max_results=200, page_token=token)
                found += page
                token = page.token or ""
        names = {int(v.version): [a for a, at in aliases.items() if at == int(v.version)] for v in found}
        return sorted((self._of(v, names[int(v.version)]) for v in found), key=lambda v: -v.version)

    def aliases(self) -> dict[str, int]:
        """Which alias names which version."""
        with self._client("read the aliases") as client:
            return self._aliases(client)

    def download(self, version: DrafterVersion | str | int, dest_root: Path) -> Path:
        """The verified checkpoint folder of a version; downloaded by number, and only when it is not there already.

        Args:
            dest_root: folder of all downloads; the version gets one of its own in it.

        Raises:
            CheckpointError: what arrived is not what was registered; nothing of it is left.
            RegistryError: there is no such version, or it was not registered by `register`.
        """
        if not isinstance(version, DrafterVersion):
            version = self.resolve(version)
        digest = version.tags.get("manifest_sha256")
        if digest is None or version.model_id is None:
            raise RegistryError(
                f"{self.model_name} version {version.version} has no tag manifest_sha256: it is not ours",
                "a version made by `Registry.register`",
                "register its checkpoint again with `eaglenest distill` or `Registry.register`",
            )
        dest = Path(dest_root) / self.model_name / f"{version.version}-{digest[:16]}"
        fetch_version(self.tracking_uri, self.model_name, version.version, version.model_id, digest, dest)
        return dest

    def promote(self, version: DrafterVersion | str | int) -> tuple[int | None, int]:
        """Make a version the champion; the champion so far becomes `previous_champion`. Safe to repeat.

        Two promotions at once: the later call wins, and `previous_champion` is a champion that one of them replaced.

        Returns:
            the champion before (None: there was none) and now; equal when nothing changed.

        Raises:
            RegistryError: there is no such version.
        """
        new = version.version if isinstance(version, DrafterVersion) else self.resolve(version).version
        with self._client(f"promote version {new}", missing=self._missing(f"no version {new}")) as client:
            old = self._aliases(client).get(CHAMPION)
            if old == new:
                return old, new
            if old is not None:
                client.set_registered_model_alias(self.model_name, PREVIOUS, str(old))
            client.set_registered_model_alias(self.model_name, CHAMPION, str(new))
            return old, new

    def rollback(self) -> tuple[int, int]:
        """Make `previous_champion` the champion again. A second rollback undoes the first.

        Returns:
            the champion before and now.

        Raises:
            RegistryError: there is nothing to go back to.
        """
        new = self.previous()
        old, _ = self.promote(new)
        return old or new.version, new.version

    def previous(self) -> DrafterVersion:
        """The version that a rollback returns to.

        Raises:
            RegistryError: there is none.
        """
        aliases = self.aliases()
        old, new = aliases.get(CHAMPION), aliases.get(PREVIOUS)
        if old is None or new is None or old == new:
            raise RegistryError(
                f"{self.model_name} has no champion before version {old}"
                if old
                else f"{self.model_name} has no champion",
                f"an alias {PREVIOUS} that names another version",
                "promote the version wanted: `eaglenest versions` lists them",
            )
        return self.resolve(new)

    def restore(self, before: Mapping[str, int], *, replacing: int) -> bool:
        """Undo a promotion: champion and previous champion as they were in `before`, unless someone promoted since.

        Args:
            before: `aliases()` from before the promotion.
            replacing: the version that was promoted.

        Returns:
            whether it was undone.
        """
        with self._client(f"restore champion {before.get(CHAMPION)}") as client:
            if self._aliases(client).get(CHAMPION) != replacing:
                return False
            for alias in (CHAMPION, PREVIOUS):
                if alias in before:
                    client.set_registered_model_alias(self.model_name, alias, str(before[alias]))
                else:
                    client.delete_registered_model_alias(self.model_name, alias)
            return True

    def set_figures(self, version: DrafterVersion | str | int, figures: Mapping[str, Any]) -> DrafterVersion:
        """Merge figures into a version's tags and write its description anew.

        Raises:
            BadInput: a figure has the name of a provenance tag.
            RegistryError: there is no such version.
        """
        number = version.version if isinstance(version, DrafterVersion) else self.resolve(version).version
        with self._client(f"update version {number}", missing=self._missing(f"no version {number}")) as client:
            present = self._of(client.get_model_version(self.model_name, str(number)))
            merged = present.figures | dict(figures)
            taken = {k: v for k, v in present.tags.items() if k not in present.figures and k != FIGURES and k != "gate"}
            for key, value in figure_tags(merged, taken).items():
                if present.tags.get(key) != value:
                    client.set_model_version_tag(self.model_name, str(number), key, value)
            self._describe(client, number)
            return self._of(client.get_model_version(self.model_name, str(number)))

    def _describe(self, client: Any, version: int) -> None:
        found = client.get_model_version(self.model_name, str(version))
        url = None
        if found.run_id:
            info = client.get_run(found.run_id).info
            url = f"{shown(self.tracking_uri)}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
        client.update_model_version(self.model_name, str(version), description(version, found.tags, url))

    def _client(self, doing: str, missing: RegistryError | None = None) -> Any:
        return talking_to(self.tracking_uri, doing, missing=missing)

    def _missing(self, what: str) -> RegistryError:
        return RegistryError(
            f"{shown(self.tracking_uri)} has {what} of {self.model_name}",
            None,
            "`eaglenest versions` lists what there is; `eaglenest distill` makes the first",
        )

    def _aliases(self, client: Any) -> dict[str, int]:
        from mlflow.exceptions import MlflowException

        try:
            aliases = client.get_registered_model(self.model_name).aliases
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return {}
            raise
        return {alias: int(version) for alias, version in aliases.items()}

    def _of(self, found: Any, aliases: Iterable[str] | None = None) -> DrafterVersion:
        return DrafterVersion(
            model_name=self.model_name,
            version=int(found.version),
            aliases=tuple(sorted(found.aliases if aliases is None else aliases)),
            tags=dict(found.tags),
            run_id=found.run_id or None,
            source=found.source,
            status=found.status,
            created_at=datetime.fromtimestamp(found.creation_timestamp / 1000, UTC).isoformat(timespec="seconds"),
            description=found.description or "",
        )
