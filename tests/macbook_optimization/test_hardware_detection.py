"""The records describe the machine, or the container, that they were read from."""

import json
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from macbook_optimization import macos_readers as macos
from macbook_optimization.hardware_detection import (
    CPUSpecs,
    HardwareDetector,
    blas_libraries,
    macos_cpu,
    macos_memory,
)

RECORDED = Path(__file__).parent / "recorded"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
GIB = 2**30


@pytest.fixture
def tree(tmp_path):
    """Return a function that writes files below a root and returns a detector for it."""

    def write(files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n", encoding="utf-8")
        return HardwareDetector(tmp_path)

    return write


def meminfo(total_gib, available_gib):
    kibibytes = {
        "MemTotal": total_gib,
        "MemFree": 1,
        "MemAvailable": available_gib,
        "SwapTotal": 4,
        "SwapFree": 3,
    }
    return "\n".join(f"{name}: {gib * 2**20:>12} kB" for name, gib in kibibytes.items())


def sysctl(*names):
    text = "".join((RECORDED / f"{name}.txt").read_text(encoding="utf-8") for name in names)
    return macos.parse_sysctl(text)


@pytest.mark.parametrize(
    ("names", "cores", "threads", "compute_threads"),
    [
        (["intel_8gb_sysctl"], 4, 8, 4),
        (["m1_sysctl_hw", "m1_sysctl_machdep_cpu"], 8, 8, 4),
        (["m3_max_sysctl"], 14, 14, 10),
    ],
)
def test_a_recorded_mac_computes_on_its_fast_cores(names, cores, threads, compute_threads):
    cpu = macos_cpu(sysctl(*names))
    assert (cpu.cores, cpu.threads, cpu.compute_threads) == (cores, threads, compute_threads)


def test_the_memory_of_a_recorded_mac_is_its_nominal_memory():
    modules = (RECORDED / "m1_memory.txt").read_text(encoding="utf-8")
    memory = macos_memory(sysctl("intel_16gb_sysctl"), modules, available=3 * GIB)
    assert (memory.total_memory, memory.available_memory) == (16 * GIB, 3 * GIB)
    assert (memory.memory_type, memory.memory_speed, memory.limited_by) == ("LPDDR4", None, None)
    assert memory.swap_used == 2513.5 * 2**20


def test_a_mac_whose_tools_print_nothing_still_has_cores_and_memory():
    assert macos_cpu({}).cores >= 1
    assert macos_memory({}, None, 0).total_memory == psutil.virtual_memory().total


@linux_only
def test_this_machine_agrees_with_psutil():
    specs = HardwareDetector().detect(with_torch=False)
    assert specs.cpu.threads == psutil.cpu_count()
    assert specs.cpu.cores == (psutil.cpu_count(logical=False) or psutil.cpu_count())
    assert 1 <= specs.cpu.compute_threads <= len(os.sched_getaffinity(0))
    assert specs.cpu.architecture == {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
    if specs.memory.limited_by is None:
        assert specs.memory.total_memory == psutil.virtual_memory().total
        assert specs.memory.available_memory == pytest.approx(psutil.virtual_memory().available, rel=0.1)
    assert 0 < specs.memory.available_memory <= specs.memory.total_memory <= psutil.virtual_memory().total


@linux_only
def test_detection_without_torch_is_immediate():
    start = time.perf_counter()
    specs = HardwareDetector().detect(with_torch=False)
    assert time.perf_counter() - start < 0.2
    assert specs.platform is None


@linux_only
def test_an_x86_processor_is_described(tree):
    cpu = tree(
        {
            "proc/cpuinfo": "model name\t: Some CPU @ 2.10GHz\nflags\t\t: sse4_2 avx2 avx512f amx_bf16\n"
            "\nprocessor\t: 1\nmodel name\t: Other\nflags\t\t: sse2",
            "sys/devices/system/cpu/cpu0/cache/index0/level": "1",
            "sys/devices/system/cpu/cpu0/cache/index0/type": "Data",
            "sys/devices/system/cpu/cpu0/cache/index0/size": "48K",
            "sys/devices/system/cpu/cpu0/cache/index1/level": "1",
            "sys/devices/system/cpu/cpu0/cache/index1/type": "Instruction",
            "sys/devices/system/cpu/cpu0/cache/index1/size": "32K",
            "sys/devices/system/cpu/cpu0/cache/index2/level": "2",
            "sys/devices/system/cpu/cpu0/cache/index2/type": "Unified",
            "sys/devices/system/cpu/cpu0/cache/index2/size": "2048K",
            "sys/devices/system/cpu/cpu0/cpufreq/base_frequency": "2100000",
            "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "4800000",
        }
    ).detect_cpu_specs()
    assert cpu.brand == "Some CPU @ 2.10GHz"
    assert cpu.features == ("AMX_BF16", "AVX2", "AVX512F", "SSE4.2")
    assert (cpu.l1d_cache, cpu.l2_cache, cpu.l3_cache) == (48 * 1024, 2048 * 1024, None)
    assert (cpu.base_frequency, cpu.max_frequency) == (2100.0, 4800.0)


@linux_only
def test_an_arm_processor_has_no_name_and_the_usual_feature_names(tree):
    cpu = tree(
        {"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp bf16 i8mm"}
    ).detect_cpu_specs()
    assert cpu.brand is None
    assert cpu.features == ("BF16", "DOTPROD", "FP", "FP16", "I8MM", "NEON")


@linux_only
def test_zero_frequencies_and_invalid_sizes_are_unknown(tree):
    cpu = tree(
        {
            "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "0",
            "sys/devices/system/cpu/cpu0/cpufreq/base_frequency": "<unknown>",
            "sys/devices/system/cpu/cpu0/cache/index0/size": "many",
        }
    ).detect_cpu_specs()
    assert (cpu.base_frequency, cpu.max_frequency, cpu.l1d_cache, cpu.features) == (None, None, None, ())


@linux_only
def test_the_tightest_ancestor_limits_a_v2_container(tree):
    """The middle group has 8 GiB; 5 are used, of which 2 are page cache: 8 - 3 = 5 GiB are available."""
    outer, middle = "sys/fs/cgroup/slice", "sys/fs/cgroup/slice/pod"
    memory = tree(
        {
            "proc/meminfo": meminfo(32, 20),
            "proc/self/cgroup": "0::/slice/pod/box",
            f"{outer}/memory.max": 16 * GIB,
            f"{outer}/memory.current": 6 * GIB,
            f"{middle}/memory.max": 8 * GIB,
            f"{middle}/memory.current": 5 * GIB,
            f"{middle}/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file 7",
            f"{middle}/box/memory.max": "max",
        }
    ).detect_memory_specs()
    assert (memory.total_memory, memory.available_memory) == (8 * GIB, 5 * GIB)
    assert memory.limited_by == "cgroup v2"
    assert (memory.swap_total, memory.swap_used) == (4 * GIB, GIB)


@linux_only
def test_a_full_ancestor_leaves_no_memory_even_with_a_higher_limit(tree):
    memory = tree(
        {
            "proc/meminfo": meminfo(32, 20),
            "proc/self/cgroup": "0::/slice/box",
            "sys/fs/cgroup/slice/memory.max": 16 * GIB,
            "sys/fs/cgroup/slice/memory.current": 17 * GIB,
            "sys/fs/cgroup/slice/box/memory.max": 8 * GIB,
            "sys/fs/cgroup/slice/box/memory.current": GIB,
        }
    ).detect_memory_specs()
    assert (memory.total_memory, memory.available_memory) == (8 * GIB, 0)


@linux_only
@pytest.mark.parametrize("group", ["/", "/../outside", "/docker/not-mounted-here"])
def test_a_container_that_sees_only_itself_is_limited_too(tree, group):
    detector = tree(
        {
            "proc/meminfo": meminfo(32, 2),
            "proc/self/cgroup": f"0::{group}",
            "sys/fs/cgroup/memory.max": 4 * GIB,
            "sys/fs/cgroup/memory.current": GIB,
            "sys/fs/cgroup/cpu.max": "50000 100000",
        }
    )
    memory = detector.detect_memory_specs()
    assert (memory.total_memory, memory.limited_by) == (4 * GIB, "cgroup v2")
    assert memory.available_memory == 2 * GIB, "the machine has less available than the container may use"
    cpu = detector.detect_cpu_specs()
    assert (cpu.quota, cpu.compute_threads) == (0.5, 1)


@linux_only
def test_a_v1_container_is_limited(tree):
    detector = tree(
        {
            "proc/meminfo": meminfo(32, 20),
            "proc/self/cgroup": "12:cpu,cpuacct:/box\n5:memory:/box\n1:name=systemd:/box\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": 6 * GIB,
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": 3 * GIB,
            "sys/fs/cgroup/memory/box/memory.stat": f"cache 9\ninactive_file 5\ntotal_inactive_file {GIB}",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "25000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
        }
    )
    memory = detector.detect_memory_specs()
    assert (memory.total_memory, memory.available_memory, memory.limited_by) == (
        6 * GIB,
        4 * GIB,
        "cgroup v1",
    )
    assert detector.detect_cpu_specs().quota == 0.25


@linux_only
@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "garbage\n::::\n7"},
        {
            "proc/self/cgroup": "0::/a",
            "sys/fs/cgroup/a/memory.max": "max",
            "sys/fs/cgroup/a/cpu.max": "max 100000",
        },
        {
            "proc/self/cgroup": "0::/a",
            "sys/fs/cgroup/a/memory.max": 64 * GIB,
            "sys/fs/cgroup/a/cpu.max": "1 0",
        },
        {
            "proc/self/cgroup": "4:memory:/a\n3:cpu:/a",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": -1,
        },
    ],
)
def test_without_a_limit_the_machine_is_the_limit(tree, files):
    detector = tree({"proc/meminfo": meminfo(32, 20), **files})
    memory = detector.detect_memory_specs()
    assert (memory.total_memory, memory.available_memory, memory.limited_by) == (32 * GIB, 20 * GIB, None)
    allowed = len(os.sched_getaffinity(0))
    assert detector.detect_cpu_specs().quota == (allowed if allowed < psutil.cpu_count() else None)


def cpu_of(cores, performance_cores=None, quota=None):
    unknown = dict.fromkeys(
        ("brand", "efficiency_cores", "base_frequency", "max_frequency", "l1d_cache", "l2_cache", "l3_cache")
    )
    return CPUSpecs(
        **unknown,
        architecture="x86_64",
        cores=cores,
        threads=2 * cores,
        features=(),
        performance_cores=performance_cores,
        quota=quota,
    )


@pytest.mark.parametrize(
    ("cpu", "threads"),
    [
        (cpu_of(8), 8),
        (cpu_of(8, performance_cores=6), 6),
        (cpu_of(8, quota=3.7), 3),
        (cpu_of(8, performance_cores=2, quota=3.7), 2),
        (cpu_of(8, quota=0.1), 1),
    ],
)
def test_threads_are_lowered_to_fast_cores_and_to_the_quota(cpu, threads):
    assert cpu.compute_threads == threads


@linux_only
def test_a_small_machine_gets_no_loading_workers_and_a_large_one_at_most_two(tree):
    cores = HardwareDetector().detect_cpu_specs().compute_threads
    assert tree({"proc/meminfo": meminfo(8, 6)}).get_optimal_worker_count() == 0
    assert tree({"proc/meminfo": meminfo(64, 60)}).get_optimal_worker_count() == min(2, cores // 4)


def test_blas_libraries_are_found_in_the_build_and_in_the_process():
    wheel = "Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release, LAPACK_INFO=mkl"
    assert blas_libraries(wheel, {"libscipy_openblas64_-32a4b2a6.so", "libtorch_cpu.so"}) == (
        "mkl",
        "openblas",
    )
    assert blas_libraries("BLAS_INFO=accelerate, LAPACK_INFO=accelerate", ()) == ("accelerate",)
    assert blas_libraries("BLAS_INFO=open", {"libopenblas.so.0"}) == ("openblas",)
    assert blas_libraries("", ()) == ()


@pytest.mark.slow
def test_the_platform_is_described_by_what_torch_really_uses():
    import torch

    found = HardwareDetector().detect_platform_capabilities()
    assert found.torch_version == torch.__version__
    assert found.optimal_dtype in (torch.float32, torch.bfloat16)
    assert (found.has_mkl, found.has_onednn) == (
        torch.backends.mkl.is_available(),
        torch.backends.mkldnn.is_available(),
    )
    assert not found.has_mkl or "mkl" in found.blas
    assert found.has_accelerate == ("accelerate" in found.blas)
    specs = replace(HardwareDetector().detect(with_torch=False), platform=found)
    written = json.loads(json.dumps(specs.to_json()))
    assert written["platform"]["optimal_dtype"] in ("float32", "bfloat16")
    assert written["cpu"]["cores"] == specs.cpu.cores
