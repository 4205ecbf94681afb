"""One rope configuration of each kind, for head dim 128."""

from __future__ import annotations

from models.rope_config import RopeConfig

SHORT, LONG = (tuple(1 + step * i for i in range(64)) for step in (0.01, 0.5))
KINDS = {
    "default": RopeConfig(theta=500_000.0),
    "linear": RopeConfig(kind="linear", theta=10_000.0, factor=3.0),
    "llama3": RopeConfig(kind="llama3", theta=500_000.0, factor=8.0, original_length=8192),
    "yarn": RopeConfig(kind="yarn", theta=500_000.0, factor=8.0, original_length=8192),
    "longrope": RopeConfig(
        kind="longrope",
        theta=10_000.0,
        factor=32.0,
        original_length=4096,
        short_factors=SHORT,
        long_factors=LONG,
    ),
}
