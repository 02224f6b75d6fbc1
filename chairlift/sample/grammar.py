"""Which tokens may come next in an answer that must have a form.

llguidance does the parsing; here a `Grammar` and a tokenizer become what the sampler asks, row by row. Refuses to know
requests, logits and PyTorch. Imported only when a grammar is used: nothing else needs llguidance.
"""

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from chairlift.errors import InvalidRequestError
from chairlift.params import Grammar, SamplingParams

_END = "<chairlift: end of the grammar>"
_MOST_KEPT = 128  # compiled grammars, per tokenizer
# llguidance cannot be interrupted, so what it may build is bounded: compiling a schema takes half a second at most, the
# mask of a step some 20 ms. A schema of 150 000 characters needs an eighth of the fuel and not all of the symbols.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=20_000, max_grammar_size=20_000, verbose_errors=False
)
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)')
_MOST_MULTIPLE = 100_000  # what is built for a multiple has as many states, and no limit of llguidance's counts them
_MOST_CHARACTERS = 1 << 18  # of a grammar's source
# llguidance follows references from rule to rule by recursion, 5 KB a step; a stack that overflows ends the process. No
# source of that many characters needs more than a third of this, and what is not touched takes no memory.
_STACK_BYTES = 1 << 30
# Between any two JSON tokens. Bounded: a small model that is offered endless white space may take it for ever.
_JSON: Any = {"whitespace_pattern": r"[ \n\t]{1,32}"}


class Guided:
    """The state of one answer."""

    def __init__(self, matcher: LLMatcher, num_tokens: int, params: SamplingParams) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._bits = np.zeros(num_tokens // 32 + 1, np.int32)  # one more than the tokenizer's tokens: the end
        self._stops = np.array(sorted(params.stop_ids), np.int64)
        ignored = params.eos_token_ids - params.stop_token_ids if params.ignore_eos else ()
        self._waiting_stops = np.isin(self._stops, sorted(ignored))  # those that end it only when nothing else can

    def allowed(self, size: int, may_stop: bool) -> NDArray[np.bool_]:
        """[size], by token id. Raises InvalidRequestError for a grammar that turns out too large to be followed.

        A token that ends the request is allowed where the grammar may end, and when nothing but it can follow even if
        not `may_stop` and with `ignore_eos`.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise InvalidRequestError(f"the grammar cannot be followed further: {_message(self._matcher.get_error())}")
        known = np.unpackbits(self._bits.view(np.uint8), count=self._num_tokens, bitorder="little").view(np.bool_)
        allowed = np.zeros(size, np.bool_)
        allowed[: len(known)] = known[:size]
        ends = allowed[self._stops]
        if self._matcher.is_accepting():
            ends[:] = True
        allowed[self._stops] = False
        if allowed.any():
            ends &= may_stop & ~self._waiting_stops
        allowed[self._stops] = ends
        return allowed

    def append(self, token: int) -> None:
        """The answer goes on with this token. One that the grammar does not allow is an error of the next `allowed`."""
        if token < self._num_tokens and token not in self._stops:
            self._matcher.consume_token(token)


class CompiledGrammar:
    """A `Guide`: a grammar made ready for one tokenizer."""

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens

    def follow(self, generated: Iterable[int], params: SamplingParams) -> Guided:
        """The state of an answer of which these tokens are there."""
        guided = Guided(self._matcher.deep_copy(), self._num_tokens, params)
        for token in generated:
            guided.append(token)
        return guided


class _Vocabulary:
    """A tokenizer's tokens as llguidance wants them, and the grammars compiled for them."""

    def __init__(self, backend: Any) -> None:
        self.size = backend.get_vocab_size(with_added_tokens=True)
        state = json.loads(backend.to_str())
        state["padding"] = state["truncation"] = None
        # llguidance knows one token that ends an answer; here each request has its own, so it is given one that no
        # model has, and the sampler puts the request's in its place.
        self._num_tokens = end = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        state["added_tokens"].append({"id": end, "content": _END, "special": True} | flags)
        self._tokens = LLTokenizer(json.dumps(state), eos_token=end)
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()

    def compiled(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Begins to compile what is not known yet. Gives InvalidRequestError with llguidance's words for a source that
        is none."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compile_deeply(grammar)
            if len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled

    def forget(self, grammar: Grammar) -> None:
        """What turned out bad is not kept."""
        self._compiled.pop(grammar, None)

    def _compile_deeply(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """As `_compile`, in a thread of its own that has a large stack."""
        _check(grammar)
        thread = ThreadPoolExecutor(1)
        usual = threading.stack_size(_STACK_BYTES)
        try:
            return thread.submit(self._compile, grammar)
        finally:
            threading.stack_size(usual)
            thread.shutdown(wait=False)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            matcher = LLMatcher(self._tokens, _source(grammar), log_level=0, limits=_LIMITS)
        except ValueError as fault:  # JSON that is none
            raise _bad(grammar, str(fault)) from None
        # The first mask builds the lexer's states, which every copy then has.
        bits = np.zeros(self._num_tokens // 32 + 1, np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            raise _bad(grammar, matcher.get_error())
        return CompiledGrammar(matcher, self._num_tokens)


_vocabularies: "WeakKeyDictionary[Any, _Vocabulary]" = WeakKeyDictionary()
_lock = threading.Lock()


def compile_grammar(grammar: Grammar, tokenizer: Any) -> CompiledGrammar:
    """Make a grammar ready for a fast Hugging Face tokenizer; both are kept for the next request that has them.

    Raises InvalidRequestError for a bad grammar, and for a tokenizer that is not a fast one.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not callable(getattr(backend, "to_str", None)):
        raise InvalidRequestError(
            f"a grammar needs tokenizer=, a fast tokenizer of Hugging Face, not {type(tokenizer).__name__}"
        )
    with _lock:
        vocabulary = _vocabularies.get(tokenizer)
        if vocabulary is None or vocabulary.size != backend.get_vocab_size(with_added_tokens=True):
            vocabulary = _vocabularies[tokenizer] = _Vocabulary(backend)
        compiled = vocabulary.compiled(grammar)
    try:
        return compiled.result()  # nobody else waits meanwhile
    except InvalidRequestError:
        with _lock:
            vocabulary.forget(grammar)
        raise


def _check(grammar: Grammar) -> None:
    """Raise InvalidRequestError for what would take too long."""
    source = "".join(grammar.source)
    if len(source) > _MOST_CHARACTERS:
        raise _bad(grammar, f"it has {len(source)} characters, and {_MOST_CHARACTERS} are the most")
    spelled = re.sub(r"\\u00([0-9a-fA-F]{2})", lambda found: chr(int(found[1], 16)), source)  # as JSON may hide it
    multiples = [
        int("".join(map(str, Decimal(each).normalize().as_tuple().digits))) for each in _MULTIPLE.findall(spelled)
    ]
    if (states := math.lcm(*filter(None, multiples))) > _MOST_MULTIPLE:
        raise _bad(grammar, f"what multipleOf asks for takes {states} states, and {_MOST_MULTIPLE} are the most")


def _source(grammar: Grammar) -> str:
    """In llguidance's words."""
    match grammar.kind, grammar.source:
        case "choice", answers:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(answer) for answer in answers))
        case "json_object", _:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON)
        case "json_schema", str(schema):
            return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON)
        case "regex", str(regex):
            return LLMatcher.grammar_from_regex(regex)
        case _, lark:
            return LLMatcher.grammar_from_lark(str(lark))


def _bad(grammar: Grammar, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"grammar of kind {grammar.kind} cannot be used: {_message(message)}")


def _message(text: str) -> str:
    return text.replace("<non-verbose/>", "").replace("NoExtensionBias", "nothing can match it").strip()
