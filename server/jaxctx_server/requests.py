"""Requests as a door hands them to the validator: decoded, nothing believed.

Each class is one message of the contract (protos/jaxctx/v1), and each field one of its fields, of the same name. A
value may be of any type and size; None is a field that was not sent. Sequences and mappings are taken as they come, so
that their size is checked before anything is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    seconds: object = None
    nanos: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ttl:
    duration: object = None  # Duration
    sliding: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateContextRequest:
    context_id: object = None
    model_id: object = None
    salt: object = None
    priority: object = None
    manual_commit: object = None
    pinned: object = None
    labels: object = None
    ttl: object = None  # Ttl
    pin_for: object = None  # Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    ids: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: object = None
    content: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessages:
    messages: object = None  # of ChatMessage
    add_generation_prompt: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FillRequest:
    context_id: object = None
    text: object = None
    tokens: object = None  # TokenIds
    messages: object = None  # ChatMessages
    add_special_tokens: object = None
    defer: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushRequest:
    context_id: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    temperature: object = None
    top_k: object = None
    top_p: object = None
    min_p: object = None
    repetition_penalty: object = None
    presence_penalty: object = None
    frequency_penalty: object = None
    logit_bias: object = None
    seed: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    context_id: object = None
    max_tokens: object = None
    min_tokens: object = None
    n: object = None
    sampling: object = None  # Sampling
    logprobs: object = None
    top_logprobs: object = None
    stop: object = None
    stop_token_ids: object = None
    ignore_eos: object = None
    include_stop: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMask:
    bounds: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    index: object = None
    sample: object = None  # Sampling
    logprob_ids: object = None
    top: object = None
    logits: object = None
    entropy: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    context_id: object = None
    tokens: object = None
    positions: object = None
    masks: object = None  # of AttentionMask
    keep_working: object = None
    outputs: object = None  # of PassOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    context_id: object = None
    n: object = None
    child_ids: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateRequest:
    context_id: object = None
    tokens: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindRequest:
    context_id: object = None
    to: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetContextRequest:
    context_id: object = None
    include_pages: object = None
    include_tokens: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListContextsRequest:
    limit: object = None
    page_token: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    labels: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContextRequest:
    context_id: object = None
    priority: object = None
    pinned: object = None
    labels: object = None  # Labels
    ttl: object = None  # Ttl
    pin_for: object = None  # Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    a: object = None
    b: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    context_id: object = None
    model_id: object = None
    salt: object = None
    text: object = None
    tokens: object = None  # TokenIds
    messages: object = None  # ChatMessages
    add_special_tokens: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePagesRequest:
    context_id: object = None
    pages: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPagesRequest:
    context_id: object = None
    pages: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePagesRequest:
    context_id: object = None
    pages: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseContextRequest:
    context_id: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListModelsRequest:
    limit: object = None
    page_token: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetModelRequest:
    model_id: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    model_id: object = None
    text: object = None
    add_special_tokens: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    model_id: object = None
    tokens: object = None
    skip_special_tokens: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyChatTemplateRequest:
    model_id: object = None
    messages: object = None  # ChatMessages


# Requests without fields (WatchContexts, GetStats, Drain, ClearCache) have nothing to check.
