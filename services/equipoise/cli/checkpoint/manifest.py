"""`equipoise checkpoint manifest`: write a checkpoint's manifest, or verify files against it."""

from rich.progress import DownloadColumn, TaskProgressColumn

from equipoise.cli.checkpoint.settings import ManifestSettings, WeightFormat
from equipoise.cli.display import console, print_json, progress_bar
from equipoise.settings.errors import InvalidSettingsError
from equipoise_model.checkpoint import Checkpoint, CheckpointError
from equipoise_model.checkpoint_digests import complete, verify_all
from equipoise_model.checkpoint_manifest import MANIFEST
from equipoise_model.config import Fp8Config


def run(settings: ManifestSettings) -> int:
    """Verify the files if there is a manifest; write what it lacks.

    Raises:
        InvalidSettingsError: a file is damaged, or the folder cannot be written.
        UnsupportedConfigError: the model is not supported.
    """
    file = settings.checkpoint / MANIFEST
    try:
        checkpoint = Checkpoint.open(
            settings.checkpoint,
            keep_fp8=settings.weights is not WeightFormat.BF16,
            quantize_as=Fp8Config() if settings.weights is WeightFormat.FP8 else None,
            ignore_manifest=settings.replace,
        )
        known = checkpoint.manifest
        with progress_bar(TaskProgressColumn(), DownloadColumn(binary_units=True)) as bar:
            task = bar.add_task(f"reading {settings.checkpoint}", total=None)

            def report(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            if known is not None:
                verify_all(checkpoint, progress=report)
            manifest = complete(checkpoint, mtp=checkpoint.has_mtp, progress=report)
        if manifest is not known:
            manifest.write(file)
    except CheckpointError as error:
        raise InvalidSettingsError(str(error)) from error
    except OSError as error:
        raise InvalidSettingsError(f"cannot write {file}: {error.strerror}") from error
    is_written = manifest is not known
    formats = sorted(manifest.payloads)
    fingerprint = checkpoint.with_manifest(manifest).fingerprint
    if settings.json:
        print_json(
            {
                "manifest": str(file),
                "verified": known is not None,
                "written": is_written,
                "tensors": len(manifest.tensors),
                "formats": formats,
                "fingerprint": fingerprint,
            }
        )
    else:
        done = [
            *(["all tensors match it"] if known is not None else []),
            *(["written"] if is_written else []),
        ]
        console().print(
            f"{file}: {' and '.join(done)}; {len(manifest.tensors)} tensors, "
            f"experts in {', '.join(formats)}; fingerprint {fingerprint}"
        )
    return 0
