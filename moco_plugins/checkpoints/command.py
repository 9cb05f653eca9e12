"""``moco-plugins convert`` and ``moco-plugins inspect``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .converting import convert, writers
from .loading import load

PARTS = ("backbone", "encoder", "all")


def add_commands(commands: Any) -> None:
    """Add both commands to the command line's."""
    p = commands.add_parser("convert", help="read a checkpoint of any known format and write it in another")
    p.add_argument(
        "source", type=Path, metavar="IN", help="a checkpoint, or a folder of Hugging Face's save_pretrained"
    )
    p.add_argument("out", type=Path, metavar="OUT", help="the file or folder to write")
    p.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help="torchvision, timm, mmengine, detectron2, huggingface, safetensors, onnx, moco, or a plugin's",
    )
    p.add_argument("--part", choices=PARTS, help="default: the format's habit")
    p.add_argument(
        "--arch", metavar="NAME", help="the network, where it is not recognised: resnet50, timm/vit_small_patch16_224"
    )
    p.add_argument("--force", action="store_true", help="replace OUT")
    p.set_defaults(run=run_convert)
    i = commands.add_parser("inspect", help="say what a checkpoint holds: format, architecture, parts, sizes, steps")
    i.add_argument(
        "source", type=Path, metavar="IN", help="a checkpoint, or a folder of Hugging Face's save_pretrained"
    )
    i.set_defaults(run=run_inspect)
    for command in (p, i):
        command.add_argument(
            "--trust", action="store_true", help="unpickle anything in IN, code included: for files you trust"
        )


def run_convert(arguments: argparse.Namespace) -> int:
    """Convert, and say what was read, written and left out."""
    a = arguments
    try:
        weights = convert(a.source, a.out, a.to, a.part, a.arch, a.force, a.trust)
    except FileExistsError as error:
        raise ValueError(str(error)) from error
    except LookupError as error:
        if a.to in writers():
            raise
        raise LookupError(
            f"--to {a.to!r} is not a format that is written; there are {', '.join(sorted(writers()))}"
        ) from error
    part = a.part or writers()[a.to].parts[0]
    written = ", ".join(weights.parts) if part == "all" else part
    print(f"{a.source}: {weights.format}, {weights.architecture or 'a network that is not recognised'}")
    print(f"{a.out}: {a.to}, {written}")
    if weights.left:
        more = f" and {len(weights.left) - 6} more" if len(weights.left) > 6 else ""
        print(f"left out: {', '.join(weights.left[:6])}{more}", file=sys.stderr)
    for note in weights.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what is in a file."""
    print(load(arguments.source, arguments.trust).describe())
    return 0
