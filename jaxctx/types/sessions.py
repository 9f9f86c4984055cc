"""Sessions of programs: variables, calls and the tasks that make one from the other."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx.types.generation import OutputFormat, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session: a namespace of variables and calls of one tenant."""

    session_id: str  # unique within the tenant
    ttl_s: float  # seconds after its last use until it is deleted; a running task counts as use
    variables: int  # number of variables
    calls: int  # number of calls, ended ones included
    started: int  # number of tasks in the phase STARTED


class VariableState(enum.Enum):
    """Whether a variable has its text."""

    UNSET = "unset"  # it has no text yet
    SET = "set"  # it has its text, which never changes
    FAILED = "failed"  # it will never have a text


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableInfo:
    """A semantic variable: a text that is set once."""

    variable_id: str  # unique within the session
    name: str  # the name that the client gave it; of an output, the name of its place
    description: str = ""  # the client's note. Empty: none
    state: VariableState  # whether it is set
    text: str  # its text; while an engine generates it, the part so far
    error_reason: str = ""  # why it failed: a value of ErrorReason without its prefix. Empty: it did not
    error_message: str = ""  # why it failed, for people. Empty: it did not

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCallResult:
    """A call that was submitted."""

    call_id: str  # its id, for CancelCall
    outputs: Sequence[VariableInfo] = ()  # its outputs, in their order in the template


class TaskPhase(enum.Enum):
    """How far a task is."""

    IDLE = "idle"  # nobody has asked for its output
    WAITING = "waiting"  # somebody has, and it waits for its inputs
    STARTED = "started"  # it has its inputs, and waits for an engine (a native step: for its turn) or runs
    DONE = "done"  # it has set its output
    FAILED = "failed"  # it, or an input, failed


class Criterion(enum.IntEnum):
    """What the client that asks for a variable wants optimised; each is stronger than those before it.

    It applies to everything that the variable needs. Several tasks whose outputs are inputs of one task are a group:
    only the end of the last of them counts.
    """

    THROUGHPUT = 1  # many texts per second, whatever each one takes
    TIME_PER_OUTPUT_TOKEN = 2  # a short time between tokens
    TIME_TO_FIRST_TOKEN = 3  # a short time to the first token
    LATENCY = 4  # a short time to the whole text


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTask:
    """A task, which sets one variable: the part of a call up to an output, or a native step."""

    call_id: str  # its call
    phase: TaskPhase  # how far it is
    criterion: Criterion | None = None  # the criterion with which its output was asked for. None: not asked for yet
    inputs: Sequence[str] = ()  # ids of the variables that it needs
    output: str  # id of the variable that it sets
    engine_id: str = ""  # the engine that it was dispatched to. Empty: not yet
    why: str = ""  # why this engine was chosen, for people. Empty: not dispatched yet
    function: str = ""  # the function of a native step. Empty: it is not a native step
    # The context on `engine_id` that holds its prompt and its output so far. It may be read and forked; any other
    # operation on it spoils the call. Forks belong to the caller. All tasks of a call continue one context. It is
    # closed as soon as no task of the call is asked for and unfinished, at the latest with the session; ask for a later
    # output of the call to keep it. Empty: there is none yet or any more, or it is on another engine by now.
    context_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutput:
    """An output of a call, which sets a new variable with the name of its place.

    The options are those of GenerateRequest. The output of a function has no options but `criterion`.
    """

    criterion: Criterion | None = None  # ask for the output at once. None: it waits until somebody asks
    sampling: SamplingParams = SamplingParams()  # how tokens are sampled
    max_tokens: int | None = None  # the most tokens; from 1. None: the server's default
    min_tokens: int = 0  # the fewest tokens; from 0 to max_tokens
    stop: Sequence[str] = ()  # the text ends before the first of these: up to 16, each 1..256 bytes
    stop_token_ids: Sequence[int] = ()  # or at one of these tokens: up to 64
    ignore_eos: bool = False  # continue after end-of-sequence tokens
    include_stop: bool = False  # keep the matched stop string in the text
    # What the text may look like. None: anything. It is read when an engine begins the output, which fails if it is
    # wrong.
    output_format: OutputFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The value of a place in a template, or of an argument of a function: exactly one field beside the name is set."""

    # The place's name: a letter or _, then up to 63 letters, digits or _. Or the argument's name in the function.
    name: str
    text: str | None = None  # a text of up to 2 MiB
    variable_id: str | None = None  # the text of this variable, once it is set
    output: CallOutput | None = None  # generated by the model at this place, or returned by the function


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCallRequest:
    """A request to add a call to a session: a semantic call (`template`) or a native step (`function`).

    A semantic call is a prompt with places, `{{name}}`, for inputs and outputs. The text up to an output is tokenised
    as one text, whatever its parts. An output keeps the tokens that were sampled, and the text after it is tokenised
    by itself. Each output continues everything before it. Text after the last output has no effect. The text before
    the first place, if it fills a page, is kept by the engines for later calls of the tenant, in any session: in a
    context without a session, which is closed when no call has begun with it for the server's --prefix-timeout-s. All
    other contexts of a call are closed with the call (see GraphTask.context_id).

    A native step is a function of the server, run without an engine. All parameters but one are its arguments, and
    that one is its output. It is a call with one task. If the function fails, so does its output, with
    FAILED_PRECONDITION; more than 2 MiB of output is RESOURCE_EXHAUSTED (NEVER_FITS), more than 5 seconds
    DEADLINE_EXCEEDED. Its output counts as a text that the session was given (QUOTA).
    """

    model_id: str = ""  # the model, up to 256 bytes. Empty: the server's default. Not with a function
    template: str | None = None  # the prompt, up to 2 MiB, which must not begin with an output
    # The function, up to 64 bytes. All arguments are texts; those after a "/" here are optional.
    #   strip(text / characters): the text without white space, or these characters, at both ends.
    #   split(text / separator, part): one part of a text between separators, by default lines; 0 is the first, -1 the
    #     last.
    #   join(/ separator, ...): all other arguments in their order, with the separator between them.
    #   template(template, ...): the template with the other arguments at the places, `{{name}}`, of their names.
    #   extract(text, pattern / group): the first match of an RE2 pattern, or its group of this number; the pattern has
    #     up to 1000 characters, the text 65,536.
    #   json_pointer(text / pointer): the value at a JSON pointer (RFC 6901): a string as it is, all else as JSON.
    # A server may have others: INVALID_ARGUMENT lists them for a name that is unknown.
    function: str | None = None
    # The values of its places or arguments; up to 256, each name once. An input may stand at several places.
    parameters: Sequence[Parameter]
    # Seconds that it may wait and run once it is asked for; above 0, up to 10 years.
    timeout_s: float = 600.0
