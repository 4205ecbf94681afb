"""The mixture of experts of debug_moe beside transformers' and torchtitan's: CPU-seconds and
memory, in fresh processes.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 torchtitan==0.2.2
    python -m benchmarks.moe_block --rival 'python benchmarks/moe_block.py --run transformers'
    python -m benchmarks.moe_block --rival 'VENV/bin/python benchmarks/moe_block.py --run torchtitan' [--tokens 512 16384]

A step is the forward and backward pass of one block's router and experts (dim 256, eight experts
of 176, two for each token, softmax, normalised) over one sequence; float32, one thread, no
recomputation, no loss of the router. All start from the same weights and tokens, and must give the
same output and gradients. malloc keeps freed memory, as allocators of GPUs do: otherwise much of
the time is the kernel's, for new pages. Memory is what lives at once of the tensors that a step
allocates (`saved`: between its passes), since the process also holds what malloc cannot use again.
Every other package's own module runs unchanged; `transformers` with its loop over experts,
`transformers-grouped` with its grouped products.

COMMAND is anything that takes `--tokens N` and prints one JSON line {"cpu_s_per_step": s,
"saved_mib": m, "peak_mib": m, "checks": [...]}; its runs alternate with ours. `longhaul-balanced`
is ours with the balance loss and the statistics of metrics.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIM = 256
EXPERT_DIM = 176
NUM_EXPERTS = 8
TOP_K = 2
OURS = ("longhaul", "longhaul-balanced")
KEYS = ("cpu_s_per_step", "saved_mib", "peak_mib")
KEEP_MEMORY = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**32))
WARMUP = 5
"""Steps that do not count."""
TOLERANCE = 1e-4
"""Of the checks, relative: float32."""


def build_longhaul(weights: dict[str, Any], *, balanced: bool) -> Any:
    import torch
    from torch import nn

    from models.config import ModelConfig
    from models.moe import MixtureOfExperts
    from models.presets import FAMILIES
    from models.router import statistics_length

    config: ModelConfig = FAMILIES["qwen3_moe"]["debug"]
    module = MixtureOfExperts(config, config.kinds[0])
    num_sums = statistics_length(config.num_experts)
    names = {
        "router.weight": "router",
        **{f"experts.{name}_proj": name for name in ("gate", "up", "down")},
    }
    for name, parameter in module.named_parameters():
        parameter.data = weights[names[name]]

    class Block(nn.Module):
        def forward(self, x: Any) -> Any:
            if balanced:
                module.step.balance_loss = 0.02
                module.step.num_targets = torch.tensor(float(x.shape[1]))
                module.statistics = torch.zeros(num_sums, dtype=torch.float64)
                module.step.begin(torch.zeros(x.shape[:2], dtype=torch.int64))
            return module(x, x.new_empty(0), x.new_empty(0))

    return Block(), [module.get_parameter(name) for name in names]


def build_transformers(weights: dict[str, Any], *, implementation: str) -> Any:
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes: dict[str, Any] = {
        "hidden_size": DIM,
        "moe_intermediate_size": EXPERT_DIM,
        "num_experts": NUM_EXPERTS,
    }
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=TOP_K, norm_topk_prob=True)
    config._experts_implementation = implementation
    block = Qwen3MoeSparseMoeBlock(config)
    block.gate.weight.data = weights["router"]
    block.experts.gate_up_proj.data = torch.cat([weights.pop("gate"), weights.pop("up")], dim=1)
    block.experts.down_proj.data = weights["down"]
    return block, [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]


def build_torchtitan(weights: dict[str, Any]) -> Any:
    from unittest.mock import MagicMock

    import torch

    histc = torch.histc
    # On a CPU it takes no integers.
    torch.histc = lambda x, **options: histc(x.float(), **options).to(x.dtype)
    # Triton's; only its grouped products use them.
    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
    from torchtitan.models.moe import MoE, MoEArgs  # type: ignore[import-not-found]

    arguments: dict[str, Any] = {
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "num_shared_experts": 0,
        "score_func": "softmax",
    }
    # Its grouped products round to bfloat16.
    same: dict[str, Any] = {
        "route_norm": True,
        "score_before_experts": False,
        "load_balance_coeff": None,
        "use_grouped_mm": False,
    }
    block = MoE(MoEArgs(**arguments, **same), DIM, EXPERT_DIM)
    block.tokens_per_expert.zero_()
    parameters = [block.router.gate.weight, block.experts.w1, block.experts.w3, block.experts.w2]
    for parameter, name in zip(parameters, ("router", "gate", "up", "down"), strict=True):
        parameter.data = weights[name]
    return block, parameters


BUILDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "longhaul": lambda weights: build_longhaul(weights, balanced=False),
    "longhaul-balanced": lambda weights: build_longhaul(weights, balanced=True),
    "transformers": lambda weights: build_transformers(weights, implementation="eager"),
    "transformers-grouped": lambda weights: build_transformers(
        weights, implementation="grouped_mm"
    ),
    "torchtitan": build_torchtitan,
}


def run(name: str, num_tokens: int, steps: int) -> dict[str, Any]:
    import torch

    from benchmarks.context_parallel import Peak

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    in_shape = (NUM_EXPERTS, EXPERT_DIM, DIM)
    out_shape = (NUM_EXPERTS, DIM, EXPERT_DIM)
    weights = {"gate": normal(*in_shape), "up": normal(*in_shape), "down": normal(*out_shape)}
    block, parameters = BUILDS[name](weights | {"router": normal(NUM_EXPERTS, DIM)})
    del weights
    x_BSE = torch.randn(1, num_tokens, DIM, generator=generator, requires_grad=True)
    grad_BSE = torch.randn(1, num_tokens, DIM, generator=generator)

    def step(between: Callable[[], None] = lambda: None) -> None:
        for parameter in (x_BSE, *parameters):
            parameter.grad = None
        out_BSE = block(x_BSE)
        outs[:] = [out_BSE.detach()]
        between()
        out_BSE.backward(grad_BSE)

    outs = list[torch.Tensor]()
    seconds = list[float]()
    saved = list[int]()
    for _ in range(WARMUP + steps):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    with Peak() as peak:
        step(lambda: saved.append(peak.alive))
    # The router's first: gate and up may be one parameter.
    norms = [float(each.grad.norm()) for each in [x_BSE, *parameters][:2]]
    others = math.sqrt(sum(float(each.grad.norm()) ** 2 for each in parameters[1:]))
    checks = [float((outs[0] * grad_BSE).sum()), *norms, others]
    memory = {"saved_mib": saved[0] / 2**20, "peak_mib": peak.bytes / 2**20}
    return {"cpu_s_per_step": median(seconds[WARMUP:]), **memory, "checks": checks}


def compare(rivals: Sequence[str], sizes: Sequence[int], rounds: int) -> str:
    """A table of medians; the ratio is that of a rival to ours."""
    ours = {
        name: f"{shlex.quote(sys.executable)} {shlex.quote(__file__)} --run {name}"
        for name in OURS
    }
    commands = ours | {rival.rpartition(" ")[2]: rival for rival in rivals}
    lines = ["| | tokens | tokens per CPU-s | saved MiB | peak MiB |", "|---|---|---|---|---|"]
    for num_tokens in sizes:
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                results[name].append(launch(f"{command} --tokens {num_tokens}"))
                agree(name, results[name][-1]["checks"], results["longhaul"][0]["checks"])
        middle = {
            name: [median(each[key] for each in runs) for key in KEYS]
            for name, runs in results.items()
        }
        own = middle["longhaul"]
        for name, (seconds, *memory) in middle.items():
            cells = [f"{num_tokens / seconds:,.0f}, {own[0] / seconds:.2f}x"]
            cells += [
                f"{mib:.0f}, {mib / of_own:.2f}x"
                for mib, of_own in zip(memory, own[1:], strict=True)
            ]
            lines.append(f"| {name} | {num_tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def launch(command: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | KEEP_MEMORY
    done = subprocess.run(
        shlex.split(command), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def agree(name: str, checks: Sequence[float], ours: Sequence[float]) -> None:
    """The balance loss changes gradients, so of `longhaul-balanced` only the output counts."""
    count = 1 if name == "longhaul-balanced" else len(ours)
    if any(
        abs(theirs - own) > TOLERANCE * abs(own)
        for theirs, own in zip(checks[:count], ours[:count], strict=True)
    ):
        sys.exit(f"{name} computes something else: {checks}, ours {ours}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", choices=BUILDS, help="only this one, here")
    parser.add_argument(
        "--rival",
        action="append",
        default=[],
        help="a command that runs the same; may be repeated",
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 16_384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    if options.run:
        result = run(options.run, options.tokens[0], options.steps)
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write(compare(options.rival, options.tokens, options.rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
