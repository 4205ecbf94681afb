"""Drawn runs of transformers' and TRL's trainers, on ranks that share sequences and in one
process, compared.

    python -m tests.longhaul_attention.trainer_cases [--cases 100] [--seed 0] [--case "kind=dpo, mesh=4x2"] [--record]

A case is a trainer, a dataset, a batch, a precision, a mesh and one more argument. All cases of a
mesh run in one launch, and all one-process runs in another. Prints every case that differs, with
the command that repeats it. `--record` writes which cases were equal to `trainer_cases.json` (with
`--case`, of these cases alone), from which the package's README says what was tested.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset

from longhaul_attention import ContextParallel, ContextParallelTrainer, register_transformers
from tests.longhaul_attention.in_float64 import float64_throughout

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "packages" / "attention"
RECORD = Path(__file__).with_suffix(".json")
Case = dict[str, str]
LEVELS: dict[str, tuple[str, ...]] = {
    "kind": ("trainer", "classifier", "sft", "sft_packed", "sft_flat", "dpo", "reward", "kto"),
    "mesh": ("2x2", "3x3", "4x4", "4x2"),
    "method": ("allgather", "ring", "ulysses"),
    "rows": ("5", "7", "8", "12"),
    "batch": ("1", "2", "3"),
    "accumulation": ("1", "2", "3"),
    "epochs": ("1", "2"),
    "precision": ("float64", "float32", "bf16 autocast", "fp16 autocast", "bfloat16"),
    "model": ("llama", "mistral", "qwen3", "gemma3", "gpt_oss"),
    "more": (
        "nothing",
        "checkpointing",
        "reentrant checkpointing",
        "workers",
        "drop_last",
        "smoothing",
        "stream",
        "resume",
        "predict",
        "lora",
        "compiled",
    ),
    "arguments": (
        "defaults",
        "optimizer",
        "schedule",
        "logs",
        "evaluation",
        "best",
        "loaders",
        "determinism",
        "loss",
        "rows",
        "ddp",
        "fsdp",
    ),
}
"""`mesh`: all ranks x those that share a sequence."""
DPO_LOSSES = ["sigmoid", "ipo", "robust", "apo_zero", "discopop"]
ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "optimizer": {
        "any": {
            "optim": "adamw_torch",
            "weight_decay": 0.1,
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-3,
            "max_grad_norm": 0.5,
        },
    },
    "schedule": {
        "any": {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 1e-3},
            "warmup_steps": 1,
            "learning_rate": 3e-3,
        },
    },
    "logs": {
        "any": {
            "logging_first_step": True,
            "logging_nan_inf_filter": False,
            "log_on_each_node": False,
            "log_level": "error",
            "log_level_replica": "error",
            "run_name": "one",
            "project": "two",
            "skip_memory_metrics": False,
            "logging_strategy": "epoch",
        },
    },
    "evaluation": {
        "any": {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_delay": 1,
            "eval_on_start": True,
            "eval_accumulation_steps": 1,
            "prediction_loss_only": True,
            "eval_do_concat_batches": False,
            "do_train": True,
            "do_eval": True,
            "do_predict": True,
        },
    },
    "best": {
        "any": {
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "save_only_model": True,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": True,
            "save_total_limit": 1,
            "save_on_each_node": False,
        },
    },
    "loaders": {
        "any": {
            "dataloader_num_workers": 1,
            "dataloader_pin_memory": False,
            "dataloader_persistent_workers": True,
            "dataloader_prefetch_factor": 1,
            "dataloader_in_order": False,
            "dataloader_multiprocessing_context": "fork",
            "torch_empty_cache_steps": 1,
            "train_sampling_strategy": "sequential",
        },
    },
    "determinism": {"any": {"data_seed": 5, "seed": 3, "full_determinism": True}},
    "loss": {
        "trainer": {"label_smoothing_factor": 0.2, "label_names": ["labels"]},
        "sft": {"loss_type": "dft"},
        "dpo": {
            "loss_type": DPO_LOSSES,
            "loss_weights": [0.5 + 0.1 * place for place, _ in enumerate(DPO_LOSSES)],
            "ld_alpha": 0.5,
            "beta": 0.3,
            "label_smoothing": 0.1,
            "use_weighting": True,
            "discopop_tau": 0.1,
            "disable_dropout": False,
        },
        "reward": {"center_rewards_coefficient": 0.1, "disable_dropout": False},
        "kto": {
            "loss_type": "apo_zero_unpaired",
            "beta": 0.3,
            "desirable_weight": 1.5,
            "undesirable_weight": 0.5,
            "disable_dropout": False,
        },
    },
    "rows": {
        "sft": {
            "max_length": 9,
            "truncation_mode": "keep_start",
            "pad_to_multiple_of": 8,
            "shuffle_dataset": True,
            "dataset_num_proc": 1,
        },
        "sft_packed": {
            "max_length": 32,
            "packing_strategy": "wrapped",
            "eval_packing": False,
            "pad_token": "3",
        },
        "dpo": {
            "f_divergence_type": "forward_kl",
            "max_length": 12,
            "truncation_mode": "keep_end",
            "pad_to_multiple_of": 8,
        },
        "reward": {"max_length": 12, "pad_to_multiple_of": 8, "eos_token": "4"},
        "kto": {"max_length": 12, "pad_to_multiple_of": 8},
    },
    "ddp": {
        "any": {
            "ddp_find_unused_parameters": False,
            "ddp_bucket_cap_mb": 1,
            "ddp_broadcast_buffers": False,
            "ddp_static_graph": False,
            "ddp_backend": "gloo",
            "ddp_timeout": 600,
        },
    },
    "fsdp": {
        "any": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, "min_num_params": 1}}
    },
}
OF_RANKS = ("ddp", "fsdp")
"""Arguments that one process does not have."""
"""Values that are not the defaults, by the kind of trainer that has them."""
TOLERANCES = {
    "float64": 5e-7,
    "float32": 1e-3,
    "bf16 autocast": 0.15,
    "fp16 autocast": 0.05,
    "bfloat16": 0.4,
}
"""Of logged values, which trainers add up in float32."""
COMPARED = (
    "loss",
    "grad_norm",
    "eval_loss",
    "num_tokens",
    "rewards/margins",
    "rewards/chosen",
    "mean_token_accuracy",
    "margin",
)
VOCABULARY = 64


def drawn(count: int, seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    seen = set[str]()
    while len(seen) < count:
        case = {name: draw.choice(levels) for name, levels in LEVELS.items()}
        if is_legal(case) and (name := format_case(case)) not in seen:
            seen.add(name)
            yield case


def of_each_argument(seed: int) -> Iterator[Case]:
    """A drawn case of every group of arguments with every kind of trainer that has it."""
    draw = random.Random(seed)
    levels_of = LEVELS | {"precision": ("float64", "float32")}
    for arguments in LEVELS["arguments"][1:]:
        for kind in LEVELS["kind"]:
            chosen = {"arguments": arguments, "kind": kind}
            cases = (
                {name: draw.choice(levels) for name, levels in levels_of.items()} | chosen
                for _ in range(1000)
            )
            yield from itertools.islice(filter(is_legal, cases), 1)


def is_legal(case: Case) -> bool:
    """Whether one process can do it, and gives the same rows to several groups."""
    more = case["more"]
    kind = case["kind"]
    groups = groups_of(case)
    heads = case["method"] == "ulysses" and case["mesh"] != "2x2" and case["mesh"] != "4x2"
    short = groups > 1 and int(case["rows"]) % (groups * int(case["batch"])) != 0
    by_sequence = kind in ("classifier", "dpo", "reward", "kto")
    return not (
        (heads and case["mesh"] == "3x3")
        or (case["mesh"] == "4x4" and heads)  # Two KV heads.
        or (more == "smoothing" and kind not in ("trainer", "sft"))
        or (more == "predict" and kind not in ("trainer", "classifier"))
        or (more == "stream" and kind not in ("trainer", "classifier"))
        or (more == "lora" and kind == "classifier")
        or (by_sequence and short and more != "drop_last")
        or (by_sequence and groups > 1 and more == "stream")
        # torch reads no file while its types are exchanged.
        or (more == "resume" and case["precision"] == "float64")
        # It pairs the rows of a device's batch.
        or (kind == "kto" and (int(case["batch"]) < 2 or groups > 1))
        or (more == "drop_last" and int(case["rows"]) < groups * int(case["batch"]))
        or (case["precision"] == "fp16 autocast" and case["model"] in ("gemma3",))
        or (kind in ("classifier", "reward") and case["model"] == "gemma3")
        # transformers' gpt-oss takes packed documents for one, unless attention is flash.
        or (kind in ("sft_packed", "sft_flat") and case["model"] == "gpt_oss")
        # A few rows may be packed into none.
        or (kind == "sft_packed" and more == "drop_last")
        or not fits_arguments(case)
    )


def fits_arguments(case: Case) -> bool:
    """Whether the kind of trainer has these arguments, and none of them is what the rest of the
    case asks for.
    """
    arguments = case["arguments"]
    more = case["more"]
    takes_steps = arguments in ("evaluation", "best", "logs", "determinism")
    return arguments == "defaults" or (
        not ARGUMENTS[arguments].keys().isdisjoint((case["kind"], "any"))
        and not (more in ("resume", "stream") and takes_steps)
        and not (more == "smoothing" and arguments == "loss")
        and not (more == "predict" and arguments == "evaluation")
        and not (more in ("workers", "stream", "drop_last", "resume") and arguments == "loaders")
        and not (more == "drop_last" and arguments == "rows")
    )


def groups_of(case: Case) -> int:
    ranks, cp = map(int, case["mesh"].split("x"))
    return ranks // cp


def format_case(case: Case) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


def parse_case(text: str) -> Case:
    return {name: levels[0] for name, levels in LEVELS.items()} | dict(
        each.split("=", 1) for each in text.split(", ")
    )


# ---- models and rows


def build(case: Case, attention: str) -> Any:
    transformers = import_module("transformers")
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "attn_implementation": attention,
    }  # fmt: skip
    more: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"sliding_window": 6},
        "qwen3": {},
        "gemma3": {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
        "gpt_oss": {
            "sliding_window": 6,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
        },
    }
    stem = {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen3": "Qwen3",
        "gemma3": "Gemma3",
        "gpt_oss": "GptOss",
    }[case["model"]]
    is_scored = case["kind"] in ("classifier", "reward")
    head = "ForSequenceClassification" if is_scored else "ForCausalLM"
    config_name = "Gemma3TextConfig" if case["model"] == "gemma3" else f"{stem}Config"
    labels = {"num_labels": 3 if case["kind"] == "classifier" else 1} if is_scored else {}
    config = getattr(transformers, config_name)(**sizes | more[case["model"]] | labels)
    torch.manual_seed(0)
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(
        case["precision"], torch.float32
    )
    model = getattr(transformers, f"{stem}{head}")(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    return model


def texts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 24, (count,), generator=generator)
    return [
        torch.randint(3, VOCABULARY, (int(length),), generator=generator).tolist()
        for length in lengths
    ]


def rows_of(case: Case, count: int, seed: int) -> list[dict[str, Any]]:
    first, second, third = (texts(count, seed + more) for more in (0, 10, 20))
    kind = case["kind"]
    if kind == "classifier":
        return [{"input_ids": text, "labels": sum(text) % 3} for text in first]
    if kind == "dpo":
        return [
            {"prompt": spelled(p), "chosen": spelled(c), "rejected": spelled(r)}
            for p, c, r in zip(first, second, third, strict=True)
        ]
    if kind == "reward":
        return [{"chosen_ids": c, "rejected_ids": r} for c, r in zip(first, second, strict=True)]
    if kind == "kto":
        return [
            {"prompt": spelled(p), "completion": spelled(c), "label": number % 2 == 0}
            for number, (p, c) in enumerate(zip(first, second, strict=True))
        ]
    return [{"input_ids": text} for text in first]


def spelled(text: list[int]) -> str:
    """What the tokenizer reads as these tokens, and one more in front or behind."""
    return " " + " ".join(map(str, text))


def padded(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(example["input_ids"]) for example in examples)
    tokens = torch.tensor(
        [example["input_ids"] + [2] * (width - len(example["input_ids"])) for example in examples]
    )
    mask = torch.tensor(
        [[int(at < len(example["input_ids"])) for at in range(width)] for example in examples]
    )
    labels = tokens.where(mask.bool(), -100)
    if "labels" in examples[0]:
        labels = torch.tensor([example["labels"] for example in examples])
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


# ---- a run


def arguments_of(case: Case, folder: Path, groups: int, stop: int | None) -> dict[str, Any]:
    given: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": int(case["batch"]) * groups,
        "per_device_eval_batch_size": int(case["batch"]) * groups,
        "gradient_accumulation_steps": int(case["accumulation"]), "num_train_epochs": int(case["epochs"]),
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "seed": 1, "bf16": case["precision"] == "bf16 autocast",
        "fp16": False, "gradient_checkpointing": False, "remove_unused_columns": False, "optim": "sgd",
    }  # fmt: skip
    more = case["more"]
    if "checkpointing" in more:
        given |= {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": more.startswith("reentrant")},
        }
    given |= (
        {"torch_compile": True, "torch_compile_backend": "aot_eager"} if more == "compiled" else {}
    )
    given |= {"dataloader_num_workers": 1} if more == "workers" else {}
    given |= {"dataloader_drop_last": True} if more == "drop_last" else {}
    given |= {"label_smoothing_factor": 0.1} if more == "smoothing" else {}
    given |= {"max_steps": 3} if more == "stream" else {}
    given |= (
        {"save_strategy": "steps", "save_steps": 1, "max_steps": stop or 3}
        if more == "resume"
        else {}
    )
    return given


def drawn_arguments(case: Case) -> dict[str, Any]:
    by_kind = ARGUMENTS.get(case["arguments"], {})
    return by_kind.get(case["kind"]) or by_kind.get("any", {})


def trained(case: Case, folder: Path, cp: ContextParallel | None) -> list[float]:
    """What a run logs, and what it predicts."""
    transformers = import_module("transformers")
    groups = groups_of(case) if cp is None else 1
    if case["more"] != "resume":
        return run_trainer(
            transformers, case, arguments_of(case, folder, groups, None), cp, resume=False
        )
    if cp is not None:
        run_trainer(transformers, case, arguments_of(case, folder, groups, 2), cp, resume=False)
    return run_trainer(
        transformers, case, arguments_of(case, folder, groups, None), cp, resume=cp is not None
    )


def run_trainer(
    transformers: Any,
    case: Case,
    given: dict[str, Any],
    cp: ContextParallel | None,
    *,
    resume: bool,
) -> list[float]:
    import_module("accelerate.state").AcceleratorState._reset_state()
    kind = case["kind"]
    more = case["more"]
    attention = "eager" if cp is None else "longhaul"
    model = build(case, attention)
    if more == "lora":
        peft = import_module("peft")
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        model = peft.get_peft_model(model, config)
        if case["precision"] == "float64":
            model = model.double()
    together = groups_of(case) * int(case["batch"])
    # Losses of sequences need whole batches where there are several groups.
    num_held_out = 3 * together if groups_of(case) > 1 and kind in ("dpo", "reward") else 7
    train = rows_of(case, int(case["rows"]), 0)
    held_out = rows_of(case, num_held_out, 100)
    options: dict[str, Any] = {}
    if kind in ("trainer", "classifier"):
        base = transformers.Trainer
        config_class = transformers.TrainingArguments
        options["data_collator"] = padded
        datasets: list[Any] = [Stream(train) if more == "stream" else train, held_out]
    else:
        trl = import_module("trl")
        name = {"dpo": "DPO", "reward": "Reward", "kto": "KTO"}.get(kind, "SFT")
        base = getattr(trl, f"{name}Trainer")
        config_class = getattr(trl, f"{name}Config")
        options["processing_class"] = tokenizer(transformers)
        if kind in ("dpo", "kto") and more != "lora":
            options["ref_model"] = build(case, attention)
        given |= {"max_length": None if kind == "sft_flat" else 64}
        given |= {} if kind == "reward" else {"router_aux_loss_coef": 0.0}
        given |= (
            {"packing": True}
            if kind == "sft_packed"
            else {"padding_free": True}
            if kind == "sft_flat"
            else {}
        )
        datasets = [
            import_module("datasets").Dataset.from_list(rows) for rows in (train, held_out)
        ]
    given |= drawn_arguments(case) if cp is not None or case["arguments"] not in OF_RANKS else {}
    if cp is not None:
        base = type("Shared", (ContextParallelTrainer, base), {})
        options["cp"] = cp
    if more == "predict":
        options["compute_metrics"] = lambda given: {"sum": of_labelled(given)}
    dtype = {"fp16 autocast": torch.float16}.get(case["precision"])
    context = float64_throughout() if case["precision"] == "float64" else nullcontext()
    with context:
        trainer = base(
            model=model,
            args=config_class(**given),
            train_dataset=datasets[0],
            eval_dataset=datasets[1],
            **options,
        )
        if dtype is not None:  # Accelerate has no float16 on CPUs.
            forward = trainer.compute_loss_context_manager
            trainer.compute_loss_context_manager = lambda: (
                torch.autocast("cpu", dtype=dtype) if forward else None
            )
        trainer.train(resume_from_checkpoint=resume or None)
        found = [
            entry[key]
            for entry in trainer.state.log_history
            if not resume or entry["step"] > 2 or "train_loss" in entry
            for key in COMPARED
            if key in entry
            and "train_runtime" not in entry
            and not (key == "num_tokens" and not counts_tokens(case))
        ]
        evaluated = trainer.evaluate()
        found += [
            evaluated[f"eval_{key}"]
            for key in ("loss", "sum", "rewards/margins", "margin")
            if f"eval_{key}" in evaluated
        ]
        if more == "predict":
            found += [of_labelled(trainer.predict(datasets[1]))]
    return found


def of_labelled(found: Any) -> float:
    """What was predicted where there are labels: rows are padded to other widths."""
    return float(abs(found.predictions[found.label_ids != -100]).sum())


def counts_tokens(case: Case) -> bool:
    """TRL counts from 0 again after a resume, and a row that a group repeats counts, too; packing
    changes how many there are.
    """
    if case["kind"] in ("sft_packed", "sft_flat") and groups_of(case) > 1:
        return False
    return (
        case["more"] != "resume"
        and int(case["rows"]) % (groups_of(case) * int(case["batch"])) == 0
    )


def tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    by_word = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=by_word, eos_token="1", pad_token="2"
    )


def run_all(cases: list[Case], output: Path, *, whole: bool) -> None:
    """The outcome of each case, in one process or on the ranks of its mesh."""
    warnings.simplefilter("ignore")
    import_module("transformers").logging.set_verbosity_error()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    register_transformers()
    if not whole:
        distributed.init_process_group("gloo")
    found: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        cp = None
        if not whole:
            ranks, size = map(int, case["mesh"].split("x"))
            mesh = init_device_mesh("cpu", (ranks // size, size), mesh_dim_names=("dp", "cp"))[
                "cp"
            ]
            cp = ContextParallel(mesh, method=case["method"])
        folder = output.parent / f"run-{number}"
        try:
            found.append({"values": trained(case, folder, cp)})
        except Exception as error:  # noqa: BLE001 - a case that raises is one that differs
            found.append(
                {
                    "error": f"{type(error).__name__}: {error}",
                    "trace": traceback.format_exc()[-1500:],
                }
            )
            sys.stderr.write(f"{format_case(case)}: {error}\n")
        if whole or distributed.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            output.write_text(json.dumps(found))
        if not whole:
            distributed.barrier()
    if not whole:
        distributed.destroy_process_group()


def launched(cases: list[Case], output: Path, *, ranks: int) -> list[dict[str, Any]]:
    """Outcomes, in a launch of its own."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks
        else []
    )
    (output.parent / f"cases-{ranks}.json").write_text(json.dumps(cases))
    module = [
        "-m",
        "tests.longhaul_attention.trainer_cases",
        "--outcomes",
        str(output),
        str(output.parent / f"cases-{ranks}.json"),
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH") or str(PACKAGE))))
    done = subprocess.run(
        [sys.executable, *launcher, *module], cwd=output.parent, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(output.read_text()) if output.exists() else []
    return found + [{"error": "the launch ended before it", "trace": done.stderr[-3000:]}] * (
        len(cases) - len(found)
    )


def differences(cases: list[Case], folder: Path) -> list[tuple[Case, str]]:
    """Cases whose runs on ranks differ from those of one process, and how."""
    expected = launched(cases, folder / "whole.json", ranks=0)
    found: list[dict[str, Any]] = [{}] * len(cases)
    for ranks in sorted({int(case["mesh"][0]) for case in cases}):
        places = [place for place, case in enumerate(cases) if int(case["mesh"][0]) == ranks]
        own = launched(
            [cases[place] for place in places], folder / f"ranks-{ranks}.json", ranks=ranks
        )
        for place, outcome in zip(places, own, strict=True):
            found[place] = outcome
    messages = [difference(case, a, b) for case, a, b in zip(cases, expected, found, strict=True)]
    return [(case, each) for case, each in zip(cases, messages, strict=True) if each]


def difference(case: Case, expected: dict[str, Any], found: dict[str, Any]) -> str:
    for side, outcome in (("one process", expected), ("ranks", found)):
        if "error" in outcome:
            return f"{side}: {outcome['error']}\n{outcome['trace']}"
    a = expected["values"]
    b = found["values"]
    if case["more"] == "resume":
        a = a[len(a) - len(b) :]
    if len(a) != len(b):
        return f"{len(b)} values instead of {len(a)}: {b} instead of {a}"
    error = max(
        (abs(x - y) / max(abs(x), 0.2) for x, y in zip(a, b, strict=True) if math.isfinite(x)),
        default=0,
    )
    return (
        f"off by {error:.1e}: {b} instead of {a}" if error > TOLERANCES[case["precision"]] else ""
    )


def table() -> list[str]:
    """What the recorded runs say, for the package's README."""
    record = json.loads(RECORD.read_text())
    cases = [*map(parse_case, record["equal"])]
    differing = ", ".join(sorted({parse_case(case)["precision"] for case in record["differ"]}))
    others = (
        f"; {len(record['differ'])} more differ, with {differing}, by more than is allowed"
        if differing
        else ""
    )
    lines = [
        f"{len(cases)} drawn runs, each with the losses, norms, metrics and evaluation of one process{others}.",
        "",
        "| | runs |",
        "|---|---|",
    ]
    for name, levels in LEVELS.items():
        counted = {level: sum(case[name] == level for case in cases) for level in levels}
        lines.append(
            f"| {name} | {', '.join(f'{level} {count}' for level, count in counted.items())} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--outcomes", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.outcomes:
        run_all(
            json.loads(options.outcomes[1].read_text()),
            options.outcomes[0],
            whole="RANK" not in os.environ,
        )
        return 0
    cases = [parse_case(case) for case in options.case] or [*of_each_argument(options.seed)][
        : options.cases
    ]
    cases += [] if options.case else [*drawn(options.cases - len(cases), options.seed)]
    with tempfile.TemporaryDirectory() as folder:
        wrong = differences(cases, Path(folder))
    for case, message in wrong:
        sys.stdout.write(
            f'{message}\n  python -m tests.longhaul_attention.trainer_cases --case "{format_case(case)}"\n'
        )
    if options.record:
        run = [*map(format_case, cases)]
        failed = [format_case(case) for case, _ in wrong]
        equal = [name for name in run if name not in failed]
        # Those run again replace themselves; the others stay.
        if options.case:
            before = json.loads(RECORD.read_text())
            equal += [name for name in before["equal"] if name not in run]
            failed += [name for name in before["differ"] if name not in run]
        RECORD.write_text(
            json.dumps({"seed": options.seed, "equal": equal, "differ": failed}, indent=1) + "\n"
        )
    sys.stdout.write(f"{len(cases)} cases, {len(wrong)} differ\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
