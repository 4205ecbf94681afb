"""Floor 1: what is computed. A model knows nothing of ranks, meshes or steps."""

from models.config import ModelConfig
from models.llama import LLAMA2, LLAMA3, LLAMA31, LLAMA32
from models.qwen3 import QWEN3

FAMILIES: dict[str, dict[str, ModelConfig]] = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "llama3.1": LLAMA31,
    "llama3.2": LLAMA32,
    "qwen3": QWEN3,
}
