"""All that a plugin author reads: one module per kind of plugin, and this package offers the names of all.

Importing it imports neither torch nor pydantic, and each contract only when one of its names is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.contracts.api import Api, Route, ServerFacts, View
    from dovetail.contracts.attention import (
        AttentionBackend,
        AttentionLayer,
        ForwardBatch,
        KVPool,
        Phase,
        StateSave,
        StateStore,
    )
    from dovetail.contracts.cache import CacheGroup, CacheTensor, Chunk, Full, Reach, Recurrent, Window
    from dovetail.contracts.checkpoint import CheckpointFormat, Listing, TensorHeader
    from dovetail.contracts.compiler import AheadCompiler
    from dovetail.contracts.config import LayerSpec, ModelConfig, RopeConfig, RoutedExperts
    from dovetail.contracts.device import Device, DeviceEvent, DeviceGraph, DeviceView
    from dovetail.contracts.errors import (
        ConfigError,
        DovetailError,
        EngineDeadError,
        EngineError,
        ModelError,
        PluginError,
        RequestError,
        UnsupportedError,
    )
    from dovetail.contracts.grammar import (
        CompiledGrammar,
        GrammarBackend,
        GrammarLimits,
        GrammarMatcher,
        GrammarSpec,
        Kind,
        Support,
        SupportLevel,
        Vocabulary,
    )
    from dovetail.contracts.hooks import (
        CliCommand,
        CliCommands,
        ConfigDraft,
        HealthCheck,
        ProcessContext,
        Proposal,
        RouteSet,
        hookimpl,
    )
    from dovetail.contracts.kernels import Ask, Claim, Kernels, KernelSet, PackedKernel, PlainKernels
    from dovetail.contracts.layers import (
        BuildContext,
        Experts,
        LayerFactory,
        Linear,
        Norm,
        Parallel,
        Part,
        RankSums,
        RMSScale,
        Stream,
    )
    from dovetail.contracts.logits import LogitsProcessor, LogitsRows
    from dovetail.contracts.model import CausalLM, Classifier, ConfigFacts, ModelPlugin, SelfLoading, WeightRule
    from dovetail.contracts.needs import AttentionCaps, Needs
    from dovetail.contracts.observers import (
        CacheEvent,
        CacheObserver,
        ChoiceTimes,
        HttpEnd,
        HttpStart,
        LoadStats,
        RequestEnd,
        RequestObserver,
        RequestProgress,
        RequestStart,
        StatLogger,
    )
    from dovetail.contracts.operations import Component, Operation
    from dovetail.contracts.options import Configurable
    from dovetail.contracts.output import (
        ContentDelta,
        Event,
        FormatSpec,
        Malformed,
        Markers,
        Messages,
        NewCall,
        OutputParser,
        ReasoningDelta,
        SampleCall,
        SampleReply,
        State,
        TemplateView,
        TokenizerView,
        ToolArgs,
        ToolBody,
        ToolEnd,
        ToolEvent,
        ToolFormat,
        ToolStart,
        WrittenReply,
    )
    from dovetail.contracts.processor import ImageLayout, ImageProcessor
    from dovetail.contracts.quantization import Conversion, FileTensor, Quantization, Stored, StoredTensor, Target
    from dovetail.contracts.ranks import Communicator, PeerMemory
    from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
    from dovetail.contracts.replies import (
        CallView,
        ChoiceView,
        Failure,
        Reply,
        ReplyTokenizer,
        SamplingView,
        StepView,
        TokenLogprob,
        Tokens,
        TopLogprob,
        Writer,
    )
    from dovetail.contracts.requests import Chat, Cut, Dropped, Ids, Names, Prompt, Request, Sampling, Text, Tools
    from dovetail.contracts.scheduling import PrefixView, SchedulePolicy, WaitingRequest
    from dovetail.contracts.speculation import DraftRequest, Speculator
    from dovetail.contracts.tools import ToolParser

__all__ = [
    "AheadCompiler",
    "Api",
    "Ask",
    "AttentionBackend",
    "AttentionCaps",
    "AttentionLayer",
    "BuildContext",
    "CacheEvent",
    "CacheGroup",
    "CacheObserver",
    "CacheTensor",
    "CallView",
    "CausalLM",
    "Chat",
    "CheckpointFormat",
    "ChoiceTimes",
    "ChoiceView",
    "Chunk",
    "Claim",
    "Classifier",
    "CliCommand",
    "CliCommands",
    "Communicator",
    "CompiledGrammar",
    "Component",
    "ConfigDraft",
    "ConfigError",
    "ConfigFacts",
    "Configurable",
    "ContentDelta",
    "Conversion",
    "Cut",
    "Device",
    "DeviceEvent",
    "DeviceGraph",
    "DeviceView",
    "DovetailError",
    "DraftRequest",
    "Dropped",
    "EngineDeadError",
    "EngineError",
    "Event",
    "Experts",
    "Failure",
    "FileTensor",
    "FormatSpec",
    "ForwardBatch",
    "Full",
    "GrammarBackend",
    "GrammarLimits",
    "GrammarMatcher",
    "GrammarSpec",
    "HealthCheck",
    "HttpEnd",
    "HttpStart",
    "Ids",
    "ImageLayout",
    "ImageProcessor",
    "KVPool",
    "KernelSet",
    "Kernels",
    "Kind",
    "LayerFactory",
    "LayerSpec",
    "Linear",
    "Listing",
    "LoadStats",
    "LogitsProcessor",
    "LogitsRows",
    "Malformed",
    "Markers",
    "Messages",
    "ModelConfig",
    "ModelError",
    "ModelPlugin",
    "Names",
    "Needs",
    "NewCall",
    "Norm",
    "Operation",
    "OutputParser",
    "PackedKernel",
    "Parallel",
    "ParserRequest",
    "Part",
    "PeerMemory",
    "Phase",
    "PlainKernels",
    "PluginError",
    "PrefixView",
    "ProcessContext",
    "Prompt",
    "Proposal",
    "Quantization",
    "RMSScale",
    "RankSums",
    "Reach",
    "ReasoningDelta",
    "ReasoningParser",
    "Recurrent",
    "Reply",
    "ReplyTokenizer",
    "Request",
    "RequestEnd",
    "RequestError",
    "RequestObserver",
    "RequestProgress",
    "RequestStart",
    "RopeConfig",
    "Route",
    "RouteSet",
    "RoutedExperts",
    "SampleCall",
    "SampleReply",
    "Sampling",
    "SamplingView",
    "SchedulePolicy",
    "SelfLoading",
    "ServerFacts",
    "Speculator",
    "StatLogger",
    "State",
    "StateSave",
    "StateStore",
    "StepView",
    "Stored",
    "StoredTensor",
    "Stream",
    "Support",
    "SupportLevel",
    "Target",
    "TemplateView",
    "TensorHeader",
    "Text",
    "TokenLogprob",
    "TokenizerView",
    "Tokens",
    "ToolArgs",
    "ToolBody",
    "ToolEnd",
    "ToolEvent",
    "ToolFormat",
    "ToolParser",
    "ToolStart",
    "Tools",
    "TopLogprob",
    "UnsupportedError",
    "View",
    "Vocabulary",
    "WaitingRequest",
    "WeightRule",
    "Window",
    "Writer",
    "WrittenReply",
    "hookimpl",
]

_NAMES = {
    "api": "Api Route ServerFacts View",
    "attention": "AttentionBackend AttentionLayer ForwardBatch KVPool Phase StateSave StateStore",
    "cache": "CacheGroup CacheTensor Chunk Full Reach Recurrent Window",
    "checkpoint": "CheckpointFormat Listing TensorHeader",
    "compiler": "AheadCompiler",
    "config": "LayerSpec ModelConfig RopeConfig RoutedExperts",
    "device": "Device DeviceEvent DeviceGraph DeviceView",
    "errors": "ConfigError DovetailError EngineDeadError EngineError ModelError PluginError RequestError "
    "UnsupportedError",
    "grammar": "CompiledGrammar GrammarBackend GrammarLimits GrammarMatcher GrammarSpec Kind Support SupportLevel "
    "Vocabulary",
    "hooks": "CliCommand CliCommands ConfigDraft HealthCheck ProcessContext Proposal RouteSet hookimpl",
    "kernels": "Ask Claim KernelSet Kernels PackedKernel PlainKernels",
    "layers": "BuildContext Experts LayerFactory Linear Norm Parallel Part RMSScale RankSums Stream",
    "logits": "LogitsProcessor LogitsRows",
    "model": "CausalLM Classifier ConfigFacts ModelPlugin SelfLoading WeightRule",
    "needs": "AttentionCaps Needs",
    "observers": "CacheEvent CacheObserver ChoiceTimes HttpEnd HttpStart LoadStats RequestEnd RequestObserver "
    "RequestProgress RequestStart StatLogger",
    "operations": "Component Operation",
    "options": "Configurable",
    "output": "ContentDelta Event FormatSpec Malformed Markers Messages NewCall OutputParser ReasoningDelta "
    "SampleCall SampleReply State TemplateView TokenizerView ToolArgs ToolBody ToolEnd ToolEvent "
    "ToolFormat ToolStart WrittenReply",
    "processor": "ImageLayout ImageProcessor",
    "quantization": "Conversion FileTensor Quantization Stored StoredTensor Target",
    "ranks": "Communicator PeerMemory",
    "reasoning": "ParserRequest ReasoningParser",
    "replies": "CallView ChoiceView Failure Reply ReplyTokenizer SamplingView StepView TokenLogprob Tokens "
    "TopLogprob Writer",
    "requests": "Chat Cut Dropped Ids Names Prompt Request Sampling Text Tools",
    "scheduling": "PrefixView SchedulePolicy WaitingRequest",
    "speculation": "DraftRequest Speculator",
    "tools": "ToolParser",
}
"""By module, what of it is offered here."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
