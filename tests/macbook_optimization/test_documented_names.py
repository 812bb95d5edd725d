"""The documented API: every name imports without loading torch, and the published examples run.

The examples are those of the user's performance guide and design document, reduced to the calls they show.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import sudoku_dataset

import macbook_optimization
from macbook_optimization.cpu_optimization import CPUOptimizer, TensorOperationOptimizer
from macbook_optimization.dataset_management import DatasetManager, StreamingDataset
from macbook_optimization.hardware_detection import (
    CPUSpecs,
    HardwareDetector,
    MemorySpecs,
    PlatformCapabilities,
)
from macbook_optimization.memory_management import AdaptiveSequenceLength, MemoryManager, MemoryMonitor
from macbook_optimization.performance_reporting import (
    MemoryLeakDetector,
    PerformanceBenchmark,
    PerformanceRegression,
    analyze_performance_bottlenecks,
    diagnose_slow_training,
)
from macbook_optimization.resource_monitoring import ResourceMonitor
from macbook_optimization.training_config_adapter import (
    OptimizedTrainingConfig,
    TrainingConfigAdapter,
    ValidationResult,
)

MODULES = [path.stem for path in Path(macbook_optimization.__file__).parent.glob("*.py")]


def test_no_module_of_the_laptop_layer_loads_torch():
    imports = ", ".join(f"macbook_optimization.{name}" for name in MODULES)
    code = f"import sys, {imports}, trm.training.supervisor; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


API_PAGE = Path(__file__).parents[2] / "docs" / "laptop-api.md"
DOCUMENTED = """
HardwareDetector detect_cpu_specs detect_memory_specs detect_platform_capabilities get_optimal_worker_count
MemoryManager calculate_optimal_batch_size monitor_memory_usage force_garbage_collection
trigger_garbage_collection adjust_batch_size_dynamically MemoryMonitor AdaptiveSequenceLength
CPUOptimizer configure_all configure_torch_threads setup_mkl_optimization optimize_tensor_operations
configure_dataloader_workers TensorOperationOptimizer optimize_for_training
TrainingConfigAdapter adapt_model_config calculate_training_parameters validate_configuration
DatasetManager analyze_dataset_requirements create_memory_efficient_dataloader implement_data_streaming
preprocess_and_cache ResourceMonitor start_monitoring stop_monitoring get_thermal_state is_too_hot
ProgressDisplay CheckpointManager newest_intact PerformanceBenchmark run_full_benchmark
analyze_performance_bottlenecks diagnose_slow_training MemoryLeakDetector PerformanceRegression
"""


def names_in(code):
    """Return the names and attributes that a block of Python uses; imports and comments do not count."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | attributes


def test_the_examples_of_the_documented_api_use_every_name():
    page = API_PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    used = set().union(*map(names_in, blocks))
    assert set(DOCUMENTED.split()) - used == set()


@pytest.mark.slow
def test_the_hardware_module_detects():
    detector = HardwareDetector()
    cpu, memory = detector.detect_cpu_specs(), detector.detect_memory_specs()
    platform = detector.detect_platform_capabilities()
    assert isinstance(cpu, CPUSpecs)
    assert isinstance(memory, MemorySpecs)
    assert isinstance(platform, PlatformCapabilities)
    assert cpu.threads >= cpu.cores >= 1
    assert platform.torch_version == torch.__version__
    assert platform.optimal_dtype in (torch.float32, torch.bfloat16)
    assert detector.get_optimal_worker_count() >= 0


def test_automatic_batch_size():
    memory_manager = MemoryManager()
    optimal_batch_size = memory_manager.calculate_optimal_batch_size(
        model_size_mb=100,  # Estimated model size
        available_memory_mb=6000,  # Available for training
        safety_margin=0.8,  # Use 80% of available memory
    )
    # 4800 MB may be used; 300 are for the process, 5 x 100 for the weights, and 4 x 100 for each example.
    assert optimal_batch_size == (4800 - 300 - 500) // 400 == 10


def test_memory_monitoring_and_cleanup():
    memory_manager = MemoryManager(batch_size=4, largest=8)
    for batch_index in range(3):
        memory_stats = memory_manager.monitor_memory_usage()
        if memory_stats.percent_used > 85 or batch_index % 2 == 0:
            assert memory_manager.force_garbage_collection() >= 0
    assert memory_manager.trigger_garbage_collection() >= 0
    assert memory_manager.adjust_batch_size_dynamically(current_usage=0.5) == 4


def test_cpu_configuration():
    before = torch.get_num_threads()
    try:
        config = CPUOptimizer().configure_all()
        assert config.torch_threads == torch.get_num_threads()
        assert config.mkl_enabled == torch.backends.mkl.is_available()
        assert isinstance(config.vectorization_enabled, bool)
        optimizer = CPUOptimizer()
        assert optimizer.configure_torch_threads() >= 1
        assert optimizer.setup_mkl_optimization() == config.mkl_enabled
        assert optimizer.configure_dataloader_workers() >= 0
        for setting in (
            *optimizer.optimize_tensor_operations(),
            *TensorOperationOptimizer().optimize_for_training(),
        ):
            assert setting.why
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "my-dataset")


def test_dataset_loading(dataset, tmp_path):
    dataset_manager = DatasetManager()
    analysis = dataset_manager.analyze_dataset_requirements(dataset_paths=[str(dataset)], split="train")
    assert f"{analysis['total_size_mb']:.1f}MB"
    assert analysis["recommended_strategy"] in ("memory", "mapped", "streaming")
    assert 0 <= analysis["memory_utilization_percent"] < 100
    loader = dataset_manager.create_memory_efficient_dataloader(str(dataset), batch_size=16)
    assert sum(len(batch["inputs"]) for batch in loader) == 40
    streaming = dataset_manager.implement_data_streaming(str(dataset))
    assert isinstance(streaming, StreamingDataset)
    assert np.concatenate([chunk["inputs"] for chunk in streaming.chunks()]).shape == (40, 16)
    assert dataset_manager.preprocess_and_cache(str(dataset), str(tmp_path)).is_dir()


def test_adaptive_sequence_length():
    assert AdaptiveSequenceLength(base_seq_len=512, min_seq_len=128).adjust_for_memory_pressure(90) == 384


def test_memory_monitor_with_callbacks():
    monitor = MemoryMonitor(threshold=0.85)
    monitor.callbacks.append(lambda share: None)
    monitor.start_monitoring()
    monitor.stop_monitoring()


def test_thermal_monitoring():
    monitor = ResourceMonitor()
    monitor.start_monitoring(interval=2.0)
    thermal_state = monitor.get_thermal_state()
    monitor.stop_monitoring()
    assert thermal_state["is_throttling"] in (True, False, None)
    assert thermal_state["temperature"] is None or thermal_state["temperature"] > 0


def test_training_configuration():
    adapter = TrainingConfigAdapter()
    hardware_specs = HardwareDetector().detect(with_torch=False)
    config = adapter.adapt_model_config({"hidden_size": 4096, "num_heads": 64}, hardware_specs)
    assert config["hidden_size"] <= 512
    assert config["hidden_size"] % config["num_heads"] == 0
    params = adapter.calculate_training_parameters(dataset_size=1000, hardware_specs=hardware_specs)
    assert isinstance(params, OptimizedTrainingConfig)
    result = adapter.validate_configuration(params)
    assert isinstance(result, ValidationResult)
    assert result.is_valid


@pytest.mark.slow
def test_performance_benchmark(dataset):
    config = {"hidden_size": 16, "num_heads": 2, "L_cycles": 1, "H_cycles": 1}
    results = PerformanceBenchmark().run_full_benchmark(
        model_config=config, dataset_path=str(dataset), duration_minutes=0.05
    )
    assert results["samples_per_second"] > 0
    assert results["memory_efficiency"] > 0
    assert results["cpu_utilization"] > 0


def test_performance_analysis():
    metrics = {
        "memory_usage_mb": [100, 7900],
        "cpu_usage_percent": [50, 60],
        "thermal_throttling_events": [1],
    }
    analysis = analyze_performance_bottlenecks(metrics, total_memory_mb=8000)
    assert analysis["memory_bottleneck"]
    assert analysis["cpu_underutilization"]
    assert analysis["recommendations"]
    assert diagnose_slow_training(current_sps=10, expected_sps=10).severity == "none"
    assert diagnose_slow_training(current_sps=1, expected_sps=10).severity == "severe"
    assert MemoryLeakDetector().check_for_leaks(step=1) is None
    regression = PerformanceRegression(baseline_sps=10)
    assert [regression.check_regression(5) for _ in range(21)][-1]
