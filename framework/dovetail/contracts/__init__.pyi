"""The names that the package offers, each once: type checkers read them here, and so does the package at run time."""

from dovetail.contracts.api import Api as Api, Route as Route, ServerFacts as ServerFacts, View as View
from dovetail.contracts.attention import (
    AttentionBackend as AttentionBackend,
    AttentionLayer as AttentionLayer,
    ForwardBatch as ForwardBatch,
    ImageRows as ImageRows,
    KVPool as KVPool,
    Phase as Phase,
    StateSave as StateSave,
    StateStore as StateStore,
)
from dovetail.contracts.cache import (
    CacheGroup as CacheGroup,
    CacheTensor as CacheTensor,
    Chunk as Chunk,
    Full as Full,
    Reach as Reach,
    Recurrent as Recurrent,
    Window as Window,
)
from dovetail.contracts.checkpoint import (
    CheckpointFormat as CheckpointFormat,
    Listing as Listing,
    TensorHeader as TensorHeader,
)
from dovetail.contracts.compiler import AheadCompiler as AheadCompiler
from dovetail.contracts.config import (
    LayerSpec as LayerSpec,
    ModelConfig as ModelConfig,
    RopeConfig as RopeConfig,
    RoutedExperts as RoutedExperts,
    VisionPart as VisionPart,
)
from dovetail.contracts.device import (
    Device as Device,
    DeviceEvent as DeviceEvent,
    DeviceGraph as DeviceGraph,
    DeviceView as DeviceView,
)
from dovetail.contracts.errors import (
    ConfigError as ConfigError,
    DovetailError as DovetailError,
    EngineDeadError as EngineDeadError,
    EngineError as EngineError,
    ModelError as ModelError,
    PluginError as PluginError,
    RequestError as RequestError,
    UnsupportedError as UnsupportedError,
)
from dovetail.contracts.grammar import (
    CompiledGrammar as CompiledGrammar,
    GrammarBackend as GrammarBackend,
    GrammarLimits as GrammarLimits,
    GrammarMatcher as GrammarMatcher,
    GrammarSpec as GrammarSpec,
    Kind as Kind,
    Support as Support,
    SupportLevel as SupportLevel,
    Vocabulary as Vocabulary,
)
from dovetail.contracts.hooks import (
    CliCommand as CliCommand,
    CliCommands as CliCommands,
    ConfigDraft as ConfigDraft,
    HealthCheck as HealthCheck,
    ProcessContext as ProcessContext,
    Proposal as Proposal,
    RouteSet as RouteSet,
    hookimpl as hookimpl,
)
from dovetail.contracts.kernels import (
    Ask as Ask,
    Claim as Claim,
    Kernels as Kernels,
    KernelSet as KernelSet,
    PackedKernel as PackedKernel,
    PlainKernels as PlainKernels,
)
from dovetail.contracts.layers import (
    BuildContext as BuildContext,
    Experts as Experts,
    ExpertsSpec as ExpertsSpec,
    LayerFactory as LayerFactory,
    Linear as Linear,
    MatrixSpec as MatrixSpec,
    Norm as Norm,
    Parallel as Parallel,
    Part as Part,
    RankSums as RankSums,
    RMSScale as RMSScale,
    Stream as Stream,
)
from dovetail.contracts.logits import LogitsProcessor as LogitsProcessor, LogitsRows as LogitsRows
from dovetail.contracts.model import (
    CausalLM as CausalLM,
    Classifier as Classifier,
    ConfigFacts as ConfigFacts,
    ModelPlugin as ModelPlugin,
    SelfLoading as SelfLoading,
    VisionTower as VisionTower,
    WeightRule as WeightRule,
)
from dovetail.contracts.needs import AttentionCaps as AttentionCaps, Needs as Needs
from dovetail.contracts.observers import (
    CacheEvent as CacheEvent,
    CacheObserver as CacheObserver,
    ChoiceTimes as ChoiceTimes,
    HttpEnd as HttpEnd,
    HttpStart as HttpStart,
    LoadStats as LoadStats,
    RequestEnd as RequestEnd,
    RequestObserver as RequestObserver,
    RequestProgress as RequestProgress,
    RequestStart as RequestStart,
    StatLogger as StatLogger,
)
from dovetail.contracts.operations import Component as Component, Operation as Operation
from dovetail.contracts.options import Configurable as Configurable
from dovetail.contracts.output import (
    ContentDelta as ContentDelta,
    Event as Event,
    FormatSpec as FormatSpec,
    Malformed as Malformed,
    Markers as Markers,
    Messages as Messages,
    NewCall as NewCall,
    OutputParser as OutputParser,
    ReasoningDelta as ReasoningDelta,
    SampleCall as SampleCall,
    SampleReply as SampleReply,
    State as State,
    TemplateView as TemplateView,
    TokenizerView as TokenizerView,
    ToolArgs as ToolArgs,
    ToolBody as ToolBody,
    ToolEnd as ToolEnd,
    ToolEvent as ToolEvent,
    ToolFormat as ToolFormat,
    ToolStart as ToolStart,
    WrittenReply as WrittenReply,
)
from dovetail.contracts.processor import ImageLayout as ImageLayout, ImageProcessor as ImageProcessor
from dovetail.contracts.quantization import (
    Conversion as Conversion,
    FileTensor as FileTensor,
    Quantization as Quantization,
    Stored as Stored,
    StoredTensor as StoredTensor,
    Target as Target,
)
from dovetail.contracts.ranks import Communicator as Communicator, PeerMemory as PeerMemory
from dovetail.contracts.reasoning import ParserRequest as ParserRequest, ReasoningParser as ReasoningParser
from dovetail.contracts.replies import (
    CallView as CallView,
    ChoiceView as ChoiceView,
    Failure as Failure,
    Reply as Reply,
    ReplyTokenizer as ReplyTokenizer,
    SamplingView as SamplingView,
    StepView as StepView,
    TokenLogprob as TokenLogprob,
    Tokens as Tokens,
    TopLogprob as TopLogprob,
    Writer as Writer,
)
from dovetail.contracts.requests import (
    Chat as Chat,
    Cut as Cut,
    Dropped as Dropped,
    Ids as Ids,
    Names as Names,
    Prompt as Prompt,
    Request as Request,
    Sampling as Sampling,
    Text as Text,
    Tools as Tools,
)
from dovetail.contracts.scheduling import (
    PrefixView as PrefixView,
    SchedulePolicy as SchedulePolicy,
    WaitingRequest as WaitingRequest,
)
from dovetail.contracts.speculation import DraftRequest as DraftRequest, Speculator as Speculator
from dovetail.contracts.tools import ToolParser as ToolParser
