"""Recorded output of real Macs is parsed correctly; anything else gives no values.

The recordings are as published, reduced to the relevant lines. No recording of vm_stat, system_profiler or
pmset on an M3 Max was found: other Apple Silicon machines replace it, named after what is known about them.
An M1 Pro replaces the M1 in `pmset -g therm`; all Apple Silicon prints the same text.
"""

import re
import string
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from macbook_optimization import macos_readers as macos

RECORDED = Path(__file__).parent / "recorded"
SOURCES = {
    # MacBook Pro 15-inch 2012, i7-3615QM, 8 GB, no hw.cpufrequency
    "intel_8gb_sysctl": "https://github.com/andrewt0301/hse-acos-course/blob/master/docs/part1ca/14_TLP/lecture.md",
    # MacBook Pro 13-inch 2019, i5-8279U, 16 GB, macOS 10.14.6
    "intel_16gb_sysctl": "https://github.com/kellyjonbrazil/jc/blob/master/tests/fixtures/osx-10.14.6/sysctl-a.out",
    "m1_sysctl_hw": "https://qiita.com/zacky1972/items/5deec6b139a76246aeee",  # MacBook Air, 16 GB, macOS 12
    "m1_sysctl_machdep_cpu": "https://github.com/workhorsy/py-cpuinfo/issues/162",
    # Mac mini, read by a process under Rosetta
    "m1_rosetta_sysctl": "https://github.com/archspec/archspec-json/blob/master/tests/targets/rossetta2-monterey-core2",
    # MacBook Pro 14-inch, 14 cores, 36 GB, macOS 15
    "m3_max_sysctl": "https://github.com/archspec/archspec-json/blob/master/tests/targets/darwin-sequoia-m3",
    "intel_8gb_memory": "https://github.com/sebhildebrandt/systeminformation/issues/328",  # MacBook Pro 2010
    "m1_memory": "https://github.com/exelban/stats/issues/394",
    "apple_silicon_36gb_memory": "https://github.com/oshi/oshi/issues/3241",
    "intel_8gb_vm_stat": "https://github.com/mhop/fhem-mirror/blob/master/fhem/FHEM/42_SYSMON.pm",
    "m1_vm_stat": "https://github.com/ollama/ollama/issues/7255",  # 16 GB
    "apple_silicon_24gb_vm_stat": "https://github.com/HMCL-dev/HMCL/pull/4876",
    "intel_batt": "https://github.com/spaceship-prompt/spaceship-prompt/pull/640",
    "m1_batt": "https://github.com/AppHouseKitchen/AlDente-Battery_Care_and_Monitoring/issues/52",
    "desktop_batt": "https://github.com/liquidprompt/liquidprompt/pull/317",
    "intel_therm": "https://github.com/prometheus/node_exporter/issues/2031",
    # MacBook Pro 15-inch 2011 without its battery
    "intel_throttled_therm": "https://newbetuts.com/407192-where-does-the-pmset-cpu-speed-limit-variable-come-from-and-how-to-modify-it",
    "m1_pro_therm": "https://github.com/exelban/stats/issues/749",
}
SYSCTLS = sorted(name for name in SOURCES if "sysctl" in name)


def recorded(*names):
    return "".join((RECORDED / f"{name}.txt").read_text(encoding="utf-8") for name in names)


def sysctl(*names):
    return macos.parse_sysctl(recorded(*names))


INTEL, INTEL_2019 = sysctl("intel_8gb_sysctl"), sysctl("intel_16gb_sysctl")
M1, ROSETTA = sysctl("m1_sysctl_hw", "m1_sysctl_machdep_cpu"), sysctl("m1_rosetta_sysctl")
M3_MAX = sysctl("m3_max_sysctl")


def test_every_recording_names_its_source():
    assert {path.stem for path in RECORDED.glob("*.txt")} == set(SOURCES)


@pytest.mark.parametrize(
    ("facts", "brand", "levels", "caches"),
    [
        (INTEL, "Intel(R) Core(TM) i7-3615QM CPU @ 2.30GHz", (None, None), (32768, 262144, 6291456)),
        (INTEL_2019, "Intel(R) Core(TM) i5-8279U CPU @ 2.40GHz", (None, None), (32768, 262144, 6291456)),
        (M1, "Apple M1", (4, 4), (131072, 12582912, None)),
        (ROSETTA, "Apple M1", (4, 4), (131072, 12582912, None)),
        (M3_MAX, "Apple M3 Max", (10, 4), (131072, 16777216, None)),
    ],
)
def test_brand_core_levels_and_the_fast_cores_caches_are_read(facts, brand, levels, caches):
    assert facts["machdep.cpu.brand_string"] == brand
    assert macos.core_levels(facts) == levels
    assert tuple(macos.cache_bytes(facts, name) for name in ("l1d", "l2", "l3")) == caches


def test_newer_chips_without_slow_cores_have_none():
    # An M5 Pro's levels: https://github.com/pytorch/cpuinfo/pull/424
    names = {"hw.perflevel0.name": "Super", "hw.perflevel1.name": "Performance"}
    counts = {"hw.perflevel0.physicalcpu": "5", "hw.perflevel1.physicalcpu": "10"}
    assert macos.core_levels(names | counts) == (15, 0)


@pytest.mark.parametrize(
    ("facts", "present", "absent"),
    [
        (INTEL, {"AVX", "SSE4.2", "F16C", "X2APIC"}, {"AVX2", "FMA", "NEON"}),
        (INTEL_2019, {"AVX2", "FMA", "BMI2"}, {"AVX512F", "NEON"}),
        (M1, {"NEON", "FP16", "DOTPROD", "FHM"}, {"BF16", "I8MM", "SME", "AVX2", "AMX"}),
        (M3_MAX, {"NEON", "FP16", "DOTPROD", "BF16", "I8MM"}, {"SME", "EBF16", "AMX"}),
        (ROSETTA, {"SSE4.2", "AES"}, {"AVX", "AVX2", "NEON", "FP16"}),
    ],
)
def test_features_are_those_this_process_can_execute(facts, present, absent):
    features = macos.cpu_features(facts)
    assert present <= set(features)
    assert not absent & set(features)
    assert list(features) == sorted(features)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (INTEL, (None, None)),
        (INTEL_2019, (2400.0, 2400.0)),
        (M1, (None, None)),
        (M3_MAX, (None, None)),
        (ROSETTA, (None, None)),  # it claims 2.4 GHz
    ],
)
def test_a_frequency_is_reported_where_macos_has_one(facts, expected):
    assert macos.frequencies(facts) == expected


def test_memory_swap_and_version_are_read():
    assert [macos.count(facts, "hw.memsize") for facts in (INTEL, M1, M3_MAX)] == [
        8 << 30,
        16 << 30,
        36 << 30,
    ]
    assert macos.swap_bytes(INTEL_2019) == (3072 << 20, 2513 * 2**20 + 2**19)  # 2513.50M
    assert macos.swap_bytes({"vm.swapusage": "total = 1024,00M  used = 0,00M"}) == (1 << 30, 0)
    assert INTEL_2019["kern.osproductversion"] == "10.14.6"


def test_apple_silicon_is_recognised_through_rosetta():
    assert [macos.is_apple_silicon(facts) for facts in (INTEL, M1, ROSETTA)] == [False, True, True]


@pytest.mark.parametrize(
    ("value", "level"), [("1", "normal"), ("2", "warning"), ("4", "critical"), ("3", None), ("", None)]
)
def test_memory_pressure_has_three_levels(value, level):
    # No recording was found; values and name are those of https://github.com/giampaolo/psutil/issues/2725.
    facts = macos.parse_sysctl(f"kern.memorystatus_vm_pressure_level: {value}\n")
    assert macos.memory_pressure(facts) == level


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("intel_8gb_memory", ("DDR3", 1067)),
        ("m1_memory", ("LPDDR4", None)),
        ("apple_silicon_36gb_memory", ("LPDDR5", None)),
    ],
)
def test_the_memory_type_is_read(name, expected):
    assert macos.memory_module(recorded(name)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # free, file-backed and purgeable pages, times the page size
        ("intel_8gb_vm_stat", (5268 + 88747 + 69) * 4096),
        ("m1_vm_stat", (355378 + 148451 + 3946) * 16384),
        ("apple_silicon_24gb_vm_stat", (3857 + 294894 + 17340) * 16384),
    ],
)
def test_available_memory_uses_the_page_size_of_the_machine(name, expected):
    assert macos.available_bytes(recorded(name)) == expected


@pytest.mark.parametrize(
    ("name", "page_size", "gigabytes"), [("intel_8gb_vm_stat", 4096, 8), ("m1_vm_stat", 16384, 16)]
)
def test_what_is_not_available_is_in_use(name, page_size, gigabytes):
    """App, Wired and Compressed memory of Activity Monitor are the rest, except for the firmware's share."""
    pages = {
        line: int(number) for line, number in re.findall(r"([A-Z][\w -]+):\s+([0-9]+)\.", recorded(name))
    }
    app = pages["Anonymous pages"] - pages["Pages purgeable"]
    used = (app + pages["Pages wired down"] + pages["Pages occupied by compressor"]) * page_size
    assert 0.95 * gigabytes <= (used + macos.available_bytes(recorded(name))) / 2**30 <= gigabytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [("intel_batt", (True, 95.0)), ("m1_batt", (False, 80.0)), ("desktop_batt", (False, None))],
)
def test_the_power_source_and_the_charge_are_read(name, expected):
    assert macos.power_source(recorded(name)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("intel_therm", (100, 100)), ("intel_throttled_therm", (35, 100)), ("m1_pro_therm", (None, None))],
)
def test_the_speed_limit_is_read_where_there_is_one(name, expected):
    assert macos.speed_limits(recorded(name)) == expected


@pytest.mark.parametrize(("printed", "level"), [("0", "nominal"), ("2", "heavy"), ("9", None), ("", None)])
def test_the_thermal_level_is_named(printed, level):
    # The form that notifyutil(1) describes; no recording with an address was found.
    assert macos.thermal_pressure(f"com.apple.system.thermalpressurelevel {printed}\n") == level


READERS = (
    macos.memory_module,
    macos.available_bytes,
    macos.power_source,
    macos.speed_limits,
    macos.thermal_pressure,
)
FACT_READERS = (
    macos.core_levels,
    macos.cpu_features,
    macos.frequencies,
    macos.swap_bytes,
    macos.memory_pressure,
    macos.is_apple_silicon,
    macos.is_translated,
    lambda facts: macos.cache_bytes(facts, "l2"),
    lambda facts: macos.count(facts, "hw.memsize"),
)


def is_empty(value):
    return value in (None, False, ()) or value == (None, None)


@given(
    st.one_of(st.none(), st.text(string.printable), st.binary().map(lambda noise: noise.decode("latin-1")))
)
@example("hw.memsize: " + "9" * 5000)
@example("hw.perflevel0.physicalcpu: -1\nvm.swapusage: total = 1.2.3M  used = M\n")
def test_invalid_text_gives_no_values(text):
    assert all(is_empty(reader(text)) for reader in READERS)
    assert all(is_empty(reader(macos.parse_sysctl(text))) for reader in FACT_READERS)


@given(st.sampled_from(sorted(SOURCES)), st.integers(0, 3000))
def test_a_truncated_recording_gives_true_values_or_none(name, length):
    whole = recorded(name)
    truncated = whole[:length]
    for reader in READERS:
        found = flat(reader(truncated))
        expected = flat(reader(whole))
        assert all(value is None or value in expected for value in found)


@given(st.sampled_from(SYSCTLS), st.integers(0, 3000))
def test_a_truncated_sysctl_listing_gives_true_values_or_none(name, length):
    facts = macos.parse_sysctl(recorded(name)[:length])
    all_facts = sysctl(name)
    assert facts.items() <= all_facts.items()
    for reader in FACT_READERS:
        found = flat(reader(facts))
        expected = flat(reader(all_facts))
        assert all(not value or value in expected for value in found)


def flat(value):
    return value if isinstance(value, tuple) else (value,)


def test_a_tool_that_is_absent_or_prints_nothing_gives_none():
    assert macos.run_tool("/usr/sbin/no-such-tool") is None
    assert macos.run_tool("/bin/sh", "-c", "exit 3") is None
    assert macos.run_tool("/bin/sh", "-c", "echo said; exit 1") == "said\n", (
        "sysctl prints values before it fails"
    )
