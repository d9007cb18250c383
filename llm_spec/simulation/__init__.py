"""Simulated models and the virtual clock that they run by: what `llm-spec plan` computes with, and tests use, too."""

from llm_spec.simulation.clock import VirtualClockEventLoop, run_virtual
from llm_spec.simulation.hosted_model import SimulatedHostedModel
from llm_spec.simulation.targets import SimulatedDraft, SimulatedTarget

__all__ = ["SimulatedDraft", "SimulatedHostedModel", "SimulatedTarget", "VirtualClockEventLoop", "run_virtual"]
