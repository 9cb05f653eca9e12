"""LightningCLI for MoCoModule: ``python -m moco_lightly fit --config CONFIG``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from .frameworks import INSTALL, MissingFrameworkError, lightning, lightning_name


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        MissingFrameworkError: Lightning or jsonargparse is not installed.
    """
    name = lightning_name()
    lightning(name)
    classes = importlib.import_module(f"moco_lightly.{name.partition('.')[0]}")
    try:
        importlib.import_module("jsonargparse")
    except ModuleNotFoundError as error:
        raise MissingFrameworkError(f"LightningCLI needs jsonargparse: {INSTALL}") from error
    cli = importlib.import_module(f"{name}.cli").LightningCLI
    cli(
        classes.MoCoModule,
        classes.TwoViewData,
        args=list(arguments) if arguments is not None else None,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
