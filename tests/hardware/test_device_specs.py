"""Device tables are complete and sourced; errors in user files name section, key and rule."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.hardware.device_specs import MEMORY_SHARE, device_names, load_device, match_device
from trainer.hardware.spec_tables import TABLES_DIR

GIB = 1 << 30
# As torch.cuda.get_device_name gives them, with the peaks of the vendors' data sheets.
PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H800": 989.4e12,
    "NVIDIA H20": 148e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA GB300": 2500e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "AMD Instinct MI250X": 191.5e12,
    "AMD Instinct MI300X": 1300e12,
    "AMD Instinct MI325X": 1300e12,
    "AMD Instinct MI355X": 2500e12,
}


@pytest.mark.parametrize(("name", "peak"), PEAKS.items())
def test_devices_are_matched_by_torch_name(name: str, peak: float) -> None:
    found = match_device(name)
    assert found is not None
    assert found.peak_flops == peak


def test_an_unknown_device_matches_no_table() -> None:
    assert match_device("NVIDIA GeForce GTX 1080") is None


def test_the_longest_matching_name_wins() -> None:
    found = {
        name: match_device(name)
        for name in ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 NVL")
    }
    assert [device and device.name for device in found.values()] == [
        "a100-40gb",
        "a100-80gb",
        "h100-nvl",
    ]


@pytest.mark.parametrize("name", device_names())
def test_table_values_are_plausible_and_have_sources(name: str) -> None:
    device = load_device(name)
    sections = tomllib.loads((TABLES_DIR / f"{name}.toml").read_text())
    entries = [
        *sections.pop("attention", {}).values(),
        *(each for each in sections.values() if isinstance(each, dict)),
    ]
    assert [
        key
        for section in entries
        for key, entry in section.items()
        if key != "generation" and not entry["source"]
    ] == []
    assert 0.5 * device.peak_flops < device.matmul_flops < device.peak_flops
    by_kernel = {
        kernel: [rate for both in widths.values() for rate in both]
        for kernel, widths in device.attention_flops.items()
    }
    for kernel, rates in by_kernel.items():
        assert (0.03 if kernel == "efficient" else 0.1) * device.peak_flops < min(rates)
        assert max(rates) < device.matmul_flops
    assert device.generation is not None
    assert device.hbm_bandwidth > device.link_bandwidth > device.network_bandwidth > 1e9
    assert 20 * GIB < device.memory < 300 * GIB
    assert device.host_memory > device.devices_per_node * device.memory / 2
    assert device.launch_latency < 1e-4


def test_units_follow_the_key_suffixes() -> None:
    device = load_device("h100-80gb")
    assert device.memory == pytest.approx(79.1 * GIB)
    assert [device.peak_flops, device.hbm_bandwidth, device.launch_latency] == pytest.approx(
        [989.4e12, MEMORY_SHARE * 3350e9, 5e-6]
    )
    assert [device.link_bandwidth, device.network_bandwidth] == pytest.approx([360e9, 45e9])
    assert device.attention_rates("cudnn", 128) == (640e12, 500e12)


def test_missing_attention_rates_fall_back_to_the_nearest() -> None:
    device = load_device("a100-80gb")
    assert [device.rated_kernel(kernel) for kernel in ("efficient", "fa3", "cudnn")] == [
        "flash",
        "flash",
        "cudnn",
    ]
    assert device.attention_rates("flash", 96) == device.attention_rates("flash", 128)
    assert device.attention_rates("flash", 80) == device.attention_rates("flash", 64)
    assert device.attention_rates("flash", 93) == device.attention_rates("flash", 128)  # By ratio.


def test_a_user_file_overrides_its_base(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        'extends = "h100-80gb"\n[network]\ngbps = { value = 12.5, source = "ours" }\n[host]\nmemory_gib = 512\n'
    )
    ours = load_device(str(path))
    base = load_device("h100-80gb")
    assert ours.network_bandwidth == pytest.approx(base.network_bandwidth / 4)
    assert ours.host_memory == 512 * GIB
    assert (ours.name, ours.peak_flops, ours.attention_flops) == (
        "ours",
        base.peak_flops,
        base.attention_flops,
    )


def test_a_user_file_can_extend_a_sibling(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "h200"\n[host]\nmemory_gib = 512\n')
    (tmp_path / "ours.toml").write_text('extends = "base.toml"\n')
    assert load_device(str(tmp_path / "ours.toml")).host_memory == 512 * GIB


ERRORS = {
    'extends = "h100-80gb"\n[device]\nmemory_gb = 3': "[device] memory_gb is not a key; did you mean memory_gib?",
    'extends = "h100-80gb"\n[devise]\npeak_tflops = 3': "devise is not a section or key; did you mean device?",
    'extends = "h100-80gb"\n[device]\npeak_tflops = "x"': "[device] peak_tflops = x must be a valid number",
    'extends = "h100-80gb"\n[link]\nshare = 1.5': "[link] share = 1.5 must be less than or equal to 1",
    'extends = "h100-80gb"\n[link]\ndevices = 1.5': "[link] devices = 1.5 must be a valid integer",
    'extends = "h100-80gb"\n[attention.flsh]\nwidth_128 = 1': "[attention] flsh must be 'flash', 'cudnn', ",
    'extends = "h100-80gb"\n[attention.flash]\nwide = 1': "[attention.flash] wide must match pattern '^width_",
    'extends = "h100-80gb"\n[attention.flash]\nwidth_64 = { forward = 1 }': "[attention.flash.width_64] backward is missing",
    'extends = "h100-80gbb"': 'device "h100-80gbb" is neither a table nor a file; did you mean h100-80gb?',
    'extends = "ours.toml"': 'extends = "ours.toml" is circular',
    "extends = 3": "extends = 3 must be a valid string",
    'names = "H100"': "names = H100 must be a valid list",
    "[device]\nmemory_gib = 3": "[device] peak_tflops is missing",
}


@pytest.mark.parametrize(("text", "message"), ERRORS.items())
def test_errors_name_section_key_and_rule(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_device(str(path))
    assert message in str(error.value)


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        'extends = "h200"\n[device]\nmemory_gb = 1\npeak_tflops = -1\n[hosts]\ngbps = 1\n'
    )
    with pytest.raises(ConfigError) as error:
        load_device(str(path))
    assert len(error.value.problems) == 3


def test_a_similar_device_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean h100-80gb"):
        load_device("h100")


def test_the_specs_folder_only_holds_tables() -> None:
    assert {path.suffix for path in TABLES_DIR.iterdir()} == {".toml"}


def test_a_number_instead_of_a_section_is_an_error(tmp_path: Path) -> None:
    table = tmp_path / "ours.toml"
    table.write_text('extends = "h100-80gb"\ndevice = 5\n[attention]\nflash = 6\n')
    with pytest.raises(ConfigError) as error:
        load_device(str(table))
    assert [problem.partition(": ")[2] for problem in error.value.problems] == [
        "device = 5 must be a section",
        "[attention] flash = 6 must be a section",
    ]


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100"]
)
def test_similar_names_and_mig_slices_do_not_match(name: str) -> None:
    assert match_device(name) is None


def test_matmul_rate_must_not_exceed_the_peak(tmp_path: Path) -> None:
    table = tmp_path / "ours.toml"
    table.write_text('extends = "h100-80gb"\n[device]\nmatmul_tflops = 5000\n')
    with pytest.raises(ConfigError, match=r"matmul_tflops = 5000\.0 must be at most peak_tflops"):
        load_device(str(table))


@pytest.mark.parametrize(
    ("used", "message"),
    [
        (73, r"\[link\] used = 73 must be at most devices = 72"),
        (70, r"\[link\] used = 70 must be a multiple of the 4 devices of a node"),
    ],
)
def test_a_job_uses_whole_nodes_of_a_link_domain(tmp_path: Path, used: int, message: str) -> None:
    path = tmp_path / "racks.toml"
    path.write_text(f'extends = "gb200"\n[link]\nused = {used}\n')
    with pytest.raises(ConfigError, match=message):
        load_device(str(path))
    path.write_text('extends = "gb200"\n[link]\nused = { value = 72, source = "full racks" }\n')
    assert load_device(str(path)).link_domain_used == 72
