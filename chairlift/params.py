"""How one request is sampled: `SamplingParams`, and how a request's arguments and the generation configs become one.

The configs are read by attribute name only: this module refuses to know Hugging Face and PyTorch. It refuses to guess
as well: a value out of range, an unknown argument, or a setting of `generate` that has no counterpart here is an error
that names it.
"""

import difflib
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, Protocol, cast, get_args

from chairlift.errors import InvalidRequestError

LogitsProcessor = Callable[..., Any]  # (token_ids: list[int], logits: Tensor[vocab]) -> Tensor[vocab]
_LARGEST = (2 - 2**-23) * 2.0**127  # a float of 32 bits, which is what logits are
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}

GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like.

    kind: `json_schema` (source: the schema as JSON text), `json_object` (any; no source), `regex` (of the whole
    answer), `lark` (a Lark grammar as llguidance reads it, lazy rules included), `choice` (source: the answers, as a
    tuple of strings). Whether the source is a good one is checked when a request with it is submitted.
    Raises InvalidRequestError for an unknown kind, TypeError for a source of the wrong type.
    """

    kind: GrammarKind
    source: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            _refuse("grammar.kind", self.kind, f"one of {', '.join(get_args(GrammarKind))}")
        if self.kind == "choice":
            if not isinstance(self.source, (tuple, list)):
                _mistyped("grammar.source", self.source, "a tuple of strings")
            object.__setattr__(self, "source", _strings("grammar.source", tuple(self.source), 0))
            if not self.source:
                _refuse("grammar.source", self.source, "at least one answer to choose from")
        elif not isinstance(self.source, str):
            _mistyped("grammar.source", self.source, "a string")
        elif not self.source and self.kind != "json_object":
            _refuse("grammar.source", self.source, f"the text of a {self.kind}")


class Guide(Protocol):
    """A grammar made ready for one tokenizer: what the sampler asks of it."""

    def follow(self, generated: Iterable[int], params: "SamplingParams") -> Any:
        """The state of an answer of which these tokens are there; see `sample.grammar.Guided`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Everything that is said about sampling one request, resolved: each field holds what is done.

    A greedy request (`do_sample=False`) has temperature, top_k, top_p, min_p and typical_p at their neutral values.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    typical_p: float = 1.0  # 1: off
    repetition_penalty: float = 1.0  # of prompt and generated tokens
    presence_penalty: float = 0.0  # of generated tokens
    frequency_penalty: float = 0.0  # of generated tokens
    no_repeat_ngram_size: int = 0  # 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # sorted by token id
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    max_new_tokens: int | None = None  # None: up to the model's context length
    min_length: int = 0  # prompt included; `for_prompt` turns the two into new tokens
    max_length: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    num_return_sequences: int = 1
    logprobs: int | None = None  # None: not asked; 0: of each sampled token; n: of the n most likely ones too
    logprobs_mode: str = "processed"  # or "raw": before penalties, temperature and filters
    prompt_logprobs: int | None = None  # as `logprobs`
    logits_processor: LogitsProcessor | None = None
    grammar: Grammar | None = None
    guide: Guide | None = field(default=None, repr=False, compare=False)  # of `grammar`, once it has been compiled
    stop_ids: frozenset[int] = field(init=False, repr=False, compare=False)  # every token that ends the sequence

    def __post_init__(self) -> None:
        # A grammar decides by itself when the answer is over, and then nothing but one of these can follow.
        eos = frozenset[int]() if self.ignore_eos and self.grammar is None else self.eos_token_ids
        object.__setattr__(self, "stop_ids", eos | self.stop_token_ids)

    @property
    def needs_host_tokens(self) -> bool:
        """Whether a step can only be sampled once the host has seen the token of the step before."""
        return self.grammar is not None or self.needs_transcript

    @property
    def needs_transcript(self) -> bool:
        """Whether sampling looks at all the tokens before."""
        return (
            self.logits_processor is not None
            or self.no_repeat_ngram_size > 0
            or any(len(word) > 1 for word in self.bad_words_ids)
        )

    def for_prompt(self, num_prompt: int) -> "SamplingParams":
        """Turn `min_length` and `max_length`, which count the prompt, into new tokens after `num_prompt` tokens."""
        if self.max_length is None and self.min_length == 0:
            return self
        max_new_tokens = self.max_new_tokens
        if self.max_length is not None:
            max_new_tokens = self.max_length - num_prompt
            if max_new_tokens < 1:
                raise InvalidRequestError(
                    f"max_length={self.max_length} leaves no room after a prompt of {num_prompt} tokens: "
                    "give max_new_tokens, which does not count the prompt"
                )
        return replace(
            self,
            min_new_tokens=max(self.min_new_tokens, self.min_length - num_prompt),
            max_new_tokens=max_new_tokens,
            min_length=0,
            max_length=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a request asks for that changes when it runs, not what it says."""

    priority: int = 0  # lower is sooner; for the policies that look at it
    deadline_s: float | None = None  # seconds from submission; past them the request ends with "timeout"
    tenant: str | None = None  # whom the request belongs to, for a fair share between tenants
    cache_salt: str | None = None  # prefixes are shared only under equal salts

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "Terms":
        """Those of a request's arguments that are meant here; None means: not given. Raises TypeError for a wrong
        type, InvalidRequestError for a value out of range."""
        given = {name: arguments.get(name) for name in _TERMS}
        return cls(**{name: _TERMS[name](name, value, 0) for name, value in given.items() if value is not None})


def fold_seed(seed: int) -> int:
    """A seed of any size and sign as 64 bits; seeds from 0 to 2**64 - 1 are themselves."""
    if 0 <= seed < 1 << 64:
        return seed
    size = seed.bit_length() // 8 + 1
    digest = hashlib.blake2b(seed.to_bytes(size, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def child_seed(seed: int, child: int) -> int:
    """The seed of the `child`-th sequence that shares a prompt; child 0 samples as a request of its own would."""
    return seed if child == 0 else fold_seed(-1 - (fold_seed(seed) + (child << 64)))


# --- What an argument accepts ---------------------------------------------------------------------------------------
# A parser takes (name, value, vocab_size), the value never None, and returns what `SamplingParams` holds.

_Parser = Callable[[str, Any, int], Any]


def _refuse(name: str, value: object, wants: str) -> NoReturn:
    raise InvalidRequestError(f"{name}={value!r} is out of range: give {wants}")


def _mistyped(name: str, value: object, wants: str) -> NoReturn:
    raise TypeError(f"{name} must be {wants}, not {type(value).__name__} ({value!r})")


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def _is_scalar(value: object) -> bool:
    return getattr(value, "ndim", 0) == 0 and not _is_flag(value)


def _integer(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if _is_scalar(value) and hasattr(value, "__index__"):
        try:
            return operator.index(cast("Any", value))
        except TypeError:  # a tensor of floats has the method, too
            pass
    _mistyped(name, value, "an integer")


def _number(name: str, value: object) -> float:
    if not _is_scalar(value) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        _mistyped(name, value, "a number")
    try:
        number = float(cast("Any", value))
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST:
        _refuse(name, value, "a finite number, of 32 bits")
    return number


def _flag(name: str, value: Any, vocab_size: int) -> bool:
    if not _is_flag(value) or getattr(value, "ndim", 0) != 0:
        _mistyped(name, value, "True or False")
    return bool(value)


def _count(low: int | None) -> _Parser:
    def parse(name: str, value: Any, vocab_size: int) -> int:
        count = _integer(name, value)
        if low is not None and count < low:
            _refuse(name, value, f"an integer of at least {low}")
        return count

    return parse


def _real(low: float, high: float = math.inf, *, above_low: bool = False) -> _Parser:
    upper = "" if high == math.inf else f" and at most {high:g}"
    wants = f"a number {'above' if above_low else 'of at least'} {low:g}{upper}"

    def parse(name: str, value: Any, vocab_size: int) -> float:
        number = _number(name, value)
        if not low <= number <= high or (above_low and number == low):
            _refuse(name, value, wants)
        return number

    return parse


def _token(name: str, value: object, vocab_size: int) -> int:
    token = _integer(name, value)
    if not 0 <= token < vocab_size:
        _refuse(name, token, f"token ids from 0 to {vocab_size - 1} (the vocabulary)")
    return token


def _items(name: str, value: object, wants: str) -> Iterable[Any]:
    """The elements of a list, tuple, set, range or array; a bare string is none of them."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        _mistyped(name, value, wants)
    return value


def _tokens(name: str, value: Any, vocab_size: int) -> frozenset[int]:
    """One token id or a list of them."""
    if not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return frozenset((_token(name, value, vocab_size),))
    return frozenset(_token(name, token, vocab_size) for token in _items(name, value, "a list of token ids"))


def _eos_tokens(name: str, value: Any, vocab_size: int) -> frozenset[int]:
    """As `_tokens`; -1 is the customary way to say that no token ends the sequence."""
    values = value if isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0 else [value]
    kept = [token for token in _items(name, values, "a token id or a list of them") if _integer(name, token) != -1]
    return _tokens(name, kept, vocab_size)


def _bad_words(name: str, value: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    wants = "a list of lists of token ids"
    words = tuple(
        tuple(_token(name, token, vocab_size) for token in _items(name, word, wants))
        for word in _items(name, value, wants)
    )
    if not all(words):
        _refuse(name, value, "a list of non-empty lists of token ids")
    return words


def _logit_bias(name: str, value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        _mistyped(name, value, "a mapping of token ids to numbers")
    return tuple(sorted((_token(name, token, vocab_size), _number(name, bias)) for token, bias in value.items()))


def _alternatives(name: str, value: Any, vocab_size: int) -> int | None:
    if _is_flag(value) and getattr(value, "ndim", 0) == 0:
        return 0 if value else None
    count = _integer(name, value)
    if not 0 <= count <= vocab_size:
        _refuse(name, value, f"True, False or a number of alternatives from 0 to {vocab_size}")
    return count


def _strings(name: str, value: Any, vocab_size: int) -> tuple[str, ...]:
    wants = "a string or a list of strings"
    strings = (value,) if isinstance(value, str) else tuple(_items(name, value, wants))
    for string in strings:
        if not isinstance(string, str):
            _mistyped(name, string, wants)
    if "" in strings:
        _refuse(name, value, "non-empty strings")
    return strings


def _callable(name: str, value: Any, vocab_size: int) -> LogitsProcessor:
    if not callable(value):
        _mistyped(name, value, "a callable (token_ids: list[int], logits: Tensor[vocab]) -> Tensor[vocab]")
    return cast("LogitsProcessor", value)


def _string(name: str, value: Any, vocab_size: int) -> str:
    if not isinstance(value, str):
        _mistyped(name, value, "a string")
    if not value:
        _refuse(name, value, "a non-empty string, or None")
    return value


def _grammar(name: str, value: Any, vocab_size: int) -> Grammar:
    if not isinstance(value, Grammar):
        _mistyped(name, value, "a chairlift.params.Grammar")
    return value


_PARSERS: dict[str, _Parser] = {
    "do_sample": _flag,
    "temperature": _real(0.0),
    "top_k": _count(0),
    "top_p": _real(0.0, 1.0),
    "min_p": _real(0.0, 1.0),
    "typical_p": _real(0.0, 1.0, above_low=True),
    "repetition_penalty": _real(0.0, above_low=True),
    "presence_penalty": _real(-2.0, 2.0),
    "frequency_penalty": _real(-2.0, 2.0),
    "no_repeat_ngram_size": _count(0),
    "logit_bias": _logit_bias,
    "bad_words_ids": _bad_words,
    "min_new_tokens": _count(0),
    "max_new_tokens": _count(0),
    "eos_token_id": _eos_tokens,
    "ignore_eos": _flag,
    "stop_token_ids": _tokens,
    "stop_strings": _strings,
    "seed": _count(None),
    "num_return_sequences": _count(1),
    "logprobs": _alternatives,
    "prompt_logprobs": _alternatives,
    "logits_processor": _callable,
    "grammar": _grammar,
}
SAMPLING_ARGUMENTS = frozenset(_PARSERS)
_TERMS: dict[str, _Parser] = {
    "priority": _count(None),
    "deadline_s": _real(0.0, above_low=True),
    "tenant": _string,
    "cache_salt": _string,
}
REQUEST_ARGUMENTS = frozenset(_TERMS) | {"tokenizer"}  # those that stand beside the sampling arguments

_FIELD_OF = {"eos_token_id": "eos_token_ids"}  # where an argument's name is not the field's
_ONLY_IN_CONFIGS: dict[str, _Parser] = {"min_length": _count(0), "max_length": _count(1), "suppress_tokens": _tokens}

# A request that says one of these, at another value than this, and nothing about do_sample or temperature, wants to
# sample if its config leaves that open.
_ASKS_TO_SAMPLE: dict[str, object] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "seed": None}

# Settings of `generate` that change its tokens or ask for more than them, and the values (beside None) that do not.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "sequence_bias": (),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "max_time": (),
    "use_mtp": (False,),
    "is_assistant": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "assistant_ensemble_weight": (),
    "speculation_type": (),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}

_SCALARS = frozenset({int, float, bool, str, type(None)})
_MOST_REMEMBERED = 4096


class SamplingDefaults:
    """What a request gets where it says nothing: built once, asked for every request.

    generation_config: of the engine; None: the model's own. Where it leaves a field at None, the field is off, except
        for the end-of-sequence tokens, which are then those of the model's own config.
    vocab_size: number of logits.
    default_logprobs: whether a request that does not say gets the logprobs of its tokens.
    Raises InvalidRequestError for a config that asks for what is not supported, naming the field.
    """

    def __init__(
        self,
        generation_config: object | None,
        model_generation_config: object | None,
        *,
        vocab_size: int,
        default_logprobs: bool = False,
        logprobs_mode: str = "processed",
    ) -> None:
        self._vocab_size = vocab_size
        config = model_generation_config if generation_config is None else generation_config
        self._values = self._read(config)
        if self._values.get("eos_token_ids") is None:
            self._values["eos_token_ids"] = self._reachable_eos(model_generation_config)
        self._suppressed = self._values.pop("suppress_tokens", frozenset())
        self._values["logprobs_mode"] = logprobs_mode
        if default_logprobs:
            self._values.setdefault("logprobs", 0)
        self._resolved: dict[tuple[tuple[str, type, object], ...], SamplingParams] = {}

    def resolve(self, overrides: Mapping[str, object]) -> SamplingParams:
        """Merge one request's arguments (`SAMPLING_ARGUMENTS`) over the defaults; None means: not given.

        Raises TypeError for an unknown argument or a wrong type, InvalidRequestError for a value out of range.
        """
        if not all(type(value) in _SCALARS for value in overrides.values()):
            return self._merge(overrides)
        key = tuple((name, type(value), value) for name, value in overrides.items())
        params = self._resolved.get(key)
        if params is None:
            params = self._merge(overrides)
            if len(self._resolved) >= _MOST_REMEMBERED:
                self._resolved.clear()
            self._resolved[key] = params
        return params

    def _read(self, config: object | None) -> dict[str, Any]:
        """The fields that a generation config sets."""
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(config, name, None)
            if value is not None and value not in neutral:
                raise InvalidRequestError(
                    f"generation_config.{name}={value!r} is not supported: "
                    f"leave it {' or '.join(repr(each) for each in (None, *neutral))}"
                )
        values: dict[str, Any] = {}
        for name, parse in (_PARSERS | _ONLY_IN_CONFIGS).items():
            value = getattr(config, name, None)
            if name == "eos_token_id":
                values["eos_token_ids"] = None if value is None else self._reachable_eos(config)
            elif value is not None:
                values[name] = parse(f"generation_config.{name}", value, self._vocab_size)
        if "max_new_tokens" in values:
            values.pop("max_length", None)
        if "min_new_tokens" in values:
            values.pop("min_length", None)
        return values

    def _reachable_eos(self, config: object | None) -> frozenset[int]:
        """A config's end-of-sequence tokens; those beyond the vocabulary of this very model can never come up."""
        value = getattr(config, "eos_token_id", None)
        if value is None:
            return frozenset()
        tokens = _eos_tokens("generation_config.eos_token_id", value, 1 << 63)
        return frozenset(token for token in tokens if token < self._vocab_size)

    def _merge(self, overrides: Mapping[str, object]) -> SamplingParams:
        values = dict(self._values)
        given: dict[str, Any] = {}
        for name, value in overrides.items():
            parse = _PARSERS.get(name)
            if parse is None:
                _unknown(name)
            if value is not None:
                given[name] = values[_FIELD_OF.get(name, name)] = parse(name, value, self._vocab_size)
            elif name == "top_k":
                values["top_k"] = 0
        if "max_new_tokens" in given:
            values["max_length"] = None
        if "min_new_tokens" in given:
            values["min_length"] = 0
        values["do_sample"] = self._samples(given, values)
        if not values["do_sample"]:
            values.update(_NEUTRAL)
        if "bad_words_ids" in values or self._suppressed:
            values["bad_words_ids"] = self._banned(values)
        return SamplingParams(**values)

    def _samples(self, given: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
        """What the request says of itself goes first, then what its config says, then what its arguments imply."""
        if values.get("temperature", 1.0) == 0:
            return False
        if "do_sample" in given:
            return bool(given["do_sample"])
        if "temperature" in given:
            return True
        if "do_sample" in self._values:
            return bool(self._values["do_sample"])
        return any(given.get(name, off) != off for name, off in _ASKS_TO_SAMPLE.items())

    def _banned(self, values: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
        """Bad words and suppressed tokens; as in `generate`, an end-of-sequence token alone is no bad word."""
        eos = values["eos_token_ids"]
        words = [word for word in values.get("bad_words_ids", ()) if len(word) > 1 or word[0] not in eos]
        return (*words, *((token,) for token in sorted(self._suppressed)))


def _unknown(name: str) -> NoReturn:
    near = difflib.get_close_matches(name, SAMPLING_ARGUMENTS | REQUEST_ARGUMENTS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise TypeError(f"unknown sampling argument {name!r}{hint}")
