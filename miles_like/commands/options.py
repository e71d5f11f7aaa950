"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

FORMATS = "fp8, fp8-ue8m0, int4, mxfp8, mxfp4 or nvfp4"
SetOption = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="override section.key of the config")]
