"""gather: a whole machine, by NVML or by nvidia-smi, recorded or real; whatever is broken, it returns facts."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.doctor.facts import Fabric, Facts, GpuFacts, GpuPath, GpuProcess, RemappedRows
from phalanx.doctor.gather import gather, read_facts, write_facts
from phalanx.doctor.gather.found import FoundGpus
from phalanx.doctor.gather.host import CommandError
from phalanx.doctor.gather.nvml import NvmlError, read_nvml
from phalanx.doctor.gather.smi.read import FIELDS
from tests.doctor.gather import outputs
from tests.doctor.gather.fake_nvml import FakeNvml, hgx, spark
from tests.doctor.gather.recorded import SPARK_COMMANDS, SPARK_FILES, recorded_host
from tests.doctor.gather.test_fabric_manager import SWITCHES

NAMES = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}
UNITS = {"memory.total": "MiB", "memory.used": "MiB", "power.draw": "W", "power.limit": "W", "power.default_limit": "W"}
H100 = {
    "name": "NVIDIA H100 PCIe",
    "driver_version": "580.95.05",
    "compute_cap": "9.0",
    "memory.total": "81559 MiB",
    "memory.used": "4 MiB",
    "mig.mode.current": "Disabled",
    "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "temperature.gpu": "33",
    "clocks_throttle_reasons.active": "0x0000000000000040",
    "clocks_event_reasons.active": "0x0000000000000040",
    "power.draw": "48.10 W",
    "power.limit": "310.00 W",
    "power.default_limit": "350.00 W",
    "pcie.link.width.current": "8",
    "pcie.link.width.max": "16",
    "persistence_mode": "Disabled",
}
BUS = ("00000000:4F:00.0", "00000000:52:00.0")


def query_output(fields: tuple[str, ...] = FIELDS) -> str:
    titles = [NAMES.get(field, field) + (f" [{UNITS[field]}]" if field in UNITS else "") for field in fields]
    rows = [H100 | {"index": str(i), "uuid": outputs.UUIDS[i], "pci.bus_id": BUS[i]} for i in range(2)]
    return "\n".join([", ".join(titles), *(", ".join(row[field] for field in fields) for row in rows)]) + "\n"


SMI: dict[str, str | CommandError] = {
    f"nvidia-smi --query-gpu={','.join(FIELDS)}": query_output(),
    "nvidia-smi -q": outputs.REPORT,
    "nvidia-smi nvlink --status": outputs.LINKS_BRIDGED,
    "nvidia-smi nvlink -e": outputs.LINK_ERRORS,
    "nvidia-smi -L": "\n".join(f"GPU {i}: NVIDIA H100 PCIe (UUID: {outputs.UUIDS[i]})" for i in range(2)),
    "nvidia-smi --query-compute-apps": outputs.PROCESSES,
    "nvidia-smi topo -m": outputs.TOPOLOGY_CPUSET.replace("NV18", "NV12"),
    "nvidia-smi topo -p2p r": " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n",
}


def no_nvml(unread: list[str]) -> FoundGpus:
    raise NvmlError("NVML Shared Library Not Found")


def gathered(folder: Path, files: dict[str, str], commands: dict[str, str | CommandError], nvml: FakeNvml) -> Facts:
    return gather(host=recorded_host(folder, files, commands), ask_nvml=lambda unread: read_nvml(unread, nvml))


def test_a_spark_by_nvml(tmp_path: Path) -> None:
    facts = gathered(tmp_path, SPARK_FILES, SPARK_COMMANDS, spark())
    [gpu] = facts.gpus
    assert (gpu.unified, gpu.numa_node, gpu.memory_total_mib) == (True, 0, None)
    assert facts.system.available_bytes == 100000000 * 1024
    assert (facts.software.driver, facts.software.driver_cuda) == ("580.95.05", "13.0")
    assert len(facts.network.nics) == 4
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", facts.recorded_at)


def test_an_hgx_board_by_nvml(tmp_path: Path) -> None:
    commands: dict[str, str | CommandError] = {
        "systemctl show nvidia-fabricmanager.service": "LoadState=not-found\nActiveState=inactive\n"
    }
    facts = gathered(tmp_path, SWITCHES, commands, hgx())
    assert len(facts.gpus) == 8
    assert facts.fabric_manager is not None
    assert (facts.fabric_manager.running, facts.fabric_manager.switches) == (False, 4)


def test_by_nvidia_smi_where_nvml_fails(tmp_path: Path) -> None:
    host = recorded_host(tmp_path, {}, SMI)
    facts = gather(host=host, ask_nvml=no_nvml)
    assert facts.unread[0] == "NVML cannot be asked: NVML Shared Library Not Found."
    first, second = facts.gpus
    assert (first.name, first.uuid, first.bus_id, first.capability) == (
        "NVIDIA H100 PCIe",
        outputs.UUIDS[0],
        BUS[0],
        "9.0",
    )
    assert (first.memory_total_mib, first.memory_used_mib, first.temperature_c) == (81559, 4, 33)
    assert (first.mig, first.ecc, first.uncorrected_errors, first.persistence) == ("off", True, 0, False)
    assert (first.throttle, first.power_w, first.power_limit_w, first.power_default_w) == (
        ("hw-thermal",),
        48.1,
        310,
        350,
    )
    assert (first.pcie_width, first.pcie_width_max, first.numa_node, second.numa_node) == (8, 16, 1, 0)
    assert first.fabric == Fabric("completed", "Success", "limited")
    assert first.remapped == RemappedRows(1, 2, pending=True, failed=False)
    assert [(link.active, link.errors) for link in (first.links or ())[:2]] == [(True, 42), (True, None)]
    assert first.processes == (GpuProcess(4242, "/usr/bin/python3", 71234), GpuProcess(4243, "unknown", None))
    assert facts.paths == (GpuPath(0, 1, "nvlink", 12, "ok"),)
    assert (facts.software.driver, facts.software.driver_cuda) == ("580.95.05", "13.0")


def test_a_driver_that_does_not_know_a_field_is_asked_for_the_others(tmp_path: Path) -> None:
    asked = list(FIELDS)
    commands = dict(SMI)
    for unknown, newer in (
        ("compute_cap", []),
        ("mig.mode.current", []),
        ("clocks_throttle_reasons.active", ["clocks_event_reasons.active"]),
    ):
        words = f'Field "{unknown}" is not a valid field to query.'
        commands[f"nvidia-smi --query-gpu={','.join(asked)}"] = CommandError("nvidia-smi ended with 2", words)
        asked[asked.index(unknown) : asked.index(unknown) + 1] = newer
    commands[f"nvidia-smi --query-gpu={','.join(asked)}"] = query_output(tuple(asked))
    [first, _] = gather(host=recorded_host(tmp_path, {}, commands), ask_nvml=no_nvml).gpus
    assert (first.mig, first.capability, first.ecc) == (None, None, True)
    assert first.throttle == ("hw-thermal",), "by its newer name"


def test_a_failure_that_names_no_field_is_told(tmp_path: Path) -> None:
    failure = CommandError("nvidia-smi ended with 9 and said: NVIDIA-SMI has failed", "NVIDIA-SMI has failed")
    facts = gather(host=recorded_host(tmp_path, {}, {"nvidia-smi": failure}), ask_nvml=no_nvml)
    assert "nvidia-smi ended with 9 and said: NVIDIA-SMI has failed" in facts.unread[1]


@pytest.mark.parametrize("table", ["", "No devices were found\n", query_output().replace("\n1, ", "\n0, ")])
def test_a_table_of_gpus_that_makes_no_sense_is_told(tmp_path: Path, table: str) -> None:
    facts = gather(
        host=recorded_host(tmp_path, {}, SMI | {"nvidia-smi --query-gpu=" + ",".join(FIELDS): table}), ask_nvml=no_nvml
    )
    assert facts.gpus == ()
    assert any("nvidia-smi cannot tell of GPUs either" in said for said in facts.unread)


def test_slices_show_that_mig_is_on(tmp_path: Path) -> None:
    commands = SMI | {"nvidia-smi -L": outputs.LISTING}
    facts = gather(host=recorded_host(tmp_path, {}, commands), ask_nvml=no_nvml)
    assert [gpu.mig for gpu in facts.gpus] == ["on", "off"]


@pytest.mark.parametrize("missing", [name for name in SMI if "--query-gpu" not in name])
@pytest.mark.parametrize("broken", ["garbage, and more\nof it\n", CommandError("nvidia-smi ended with 6 and said: no")])
def test_each_broken_answer_of_nvidia_smi_costs_only_its_own_facts(
    tmp_path: Path, missing: str, broken: str | CommandError
) -> None:
    facts = gather(host=recorded_host(tmp_path, {}, SMI | {missing: broken}), ask_nvml=no_nvml)
    assert len(facts.gpus) == 2
    assert facts.gpus[0].memory_total_mib == 81559
    assert any("cannot be understood" in said or "tells nothing: nvidia-smi ended" in said for said in facts.unread)
    untold: dict[str, object] = {
        "nvidia-smi -q": (facts.gpus[0].fabric, facts.gpus[0].remapped, facts.software.driver_cuda),
        "nvidia-smi nvlink --status": (facts.gpus[0].links,),
        "nvidia-smi nvlink -e": tuple(link.errors for link in facts.gpus[0].links or ()),
        "nvidia-smi topo -m": facts.paths,
        "nvidia-smi topo -p2p r": tuple(path.p2p for path in facts.paths),
    }
    assert set(untold.get(missing, ())) <= {None}  # type: ignore[call-overload]


def test_paths_of_another_number_of_gpus_are_not_taken(tmp_path: Path) -> None:
    commands = SMI | {"nvidia-smi topo -m": outputs.TOPOLOGY_TWO_ISLANDS}
    facts = gather(host=recorded_host(tmp_path, {}, commands), ask_nvml=no_nvml)
    assert facts.paths == ()
    assert "nvidia-smi topo -m shows 4 GPUs and the query 2: paths are not taken." in facts.unread


def test_a_card_without_nvlink_prints_nothing(tmp_path: Path) -> None:
    facts = gather(host=recorded_host(tmp_path, {}, SMI | {"nvidia-smi nvlink --status": ""}), ask_nvml=no_nvml)
    assert [gpu.links for gpu in facts.gpus] == [(), ()]


def test_a_laptop_without_anything_of_nvidia(tmp_path: Path) -> None:
    facts = gather(host=recorded_host(tmp_path), ask_nvml=no_nvml)
    assert (facts.gpus, facts.paths, facts.fabric_manager) == ((), (), None)
    assert facts.unread[:2] == (
        "NVML cannot be asked: NVML Shared Library Not Found.",
        "nvidia-smi cannot tell of GPUs either: nvidia-smi is not installed.",
    )


def test_this_machine(tmp_path: Path) -> None:
    facts = gather()
    path = tmp_path / "facts.json"
    write_facts(path, facts)
    assert read_facts(path) == facts
    assert facts.system.cores
    assert facts.system.memory_bytes
    if not facts.gpus:
        assert any("NVML" in sentence for sentence in facts.unread)
        assert any("nvidia-smi" in sentence for sentence in facts.unread)
    for sentence in facts.unread:
        assert sentence[0].isupper() or sentence.startswith("nvidia-smi")


GARBAGE = st.one_of(
    st.text(max_size=60),
    st.sampled_from(["", "-1", "9" * 40, "0", "\x00\xff", ":", "=", "[]", "a: b", "processor : 0\n\nprocessor"]),
)


@settings(max_examples=30, deadline=None)
@given(
    files=st.dictionaries(st.sampled_from(sorted(SPARK_FILES)), GARBAGE, max_size=12),
    commands=st.dictionaries(st.sampled_from(sorted(SMI | SPARK_COMMANDS)), GARBAGE, max_size=6),
    environ=st.dictionaries(
        st.sampled_from(["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "NCCL_DEBUG", "container"]),
        st.sampled_from(["", "~", "~nobody-here/x", "relative", "/proc/1/root/x", "x" * 300]),
    ),
)
def test_no_file_or_command_makes_it_raise(
    files: dict[str, str], commands: dict[str, str], environ: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        host = recorded_host(Path(folder), SPARK_FILES | files, SMI | SPARK_COMMANDS | commands, environ)
        facts = gather(["peer"], host, no_nvml)
        path = Path(folder) / "facts.json"
        write_facts(path, facts)
        assert read_facts(path) == facts
        assert all(isinstance(gpu, GpuFacts) for gpu in facts.gpus)
