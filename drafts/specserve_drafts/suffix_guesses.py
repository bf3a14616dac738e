"""What the suffix drafter guesses, in Python: the specification of the compiled form, and what
serves where there is none (specserve_kernels.native_suffix; tests compare them draft by draft).

The context is the longest match, the guess its most frequent and then latest continuation, and how
far to go follows from the length of the match and the counts. How likely such a guess is to be
right is not assumed but learned: `_Experience` counts outcomes by source, length of match and share
of counts, when the text behind a guess is seen.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

from specserve_drafts.suffix_automaton import ROOT, SuffixAutomaton
from specserve_drafts.suffix_corpus import SEPARATOR, Corpora
from specserve_kernels.native_suffix import Ask, Guess

_HOPELESS: Final = 0.03  # a guess that survives less often than this is not worth its place
_LONGEST: Final = 12  # matches beyond this length are all alike
_TEXT, _PREDICTION, _PAST = range(3)
_PRIOR: Final = ((0.35, 0.8), (0.7, 0.9), (0.2, 0.7))  # per source: after 1 token, after many
_PRIOR_WEIGHT: Final = 8.0
_FORGET_AT: Final = 512  # halve what was counted: habits change


class _Experience:
    """The rate at which guesses of a kind were right, a Beta mean with decay."""

    def __init__(self) -> None:
        self._right: dict[int, float] = {}
        self._tried: dict[int, float] = {}

    def rate(self, kind: int) -> float:
        return self._right[kind] / self._tried[kind]

    def kind(self, source: int, match_len: int, count: int, total: int) -> int:
        """Sources, lengths 1 to _LONGEST, and shares of counts in four classes of two sizes."""
        length = match_len if match_len < _LONGEST else _LONGEST
        share = 4 * count // (total + 1)
        kind = ((source * (_LONGEST + 1) + length) * 4 + share) * 2 + (total > 3)
        if kind not in self._tried:
            short, long = _PRIOR[source]
            of_match = short + (long - short) * length / _LONGEST
            self._tried[kind] = _PRIOR_WEIGHT
            self._right[kind] = _PRIOR_WEIGHT * of_match * (0.5 + 0.5 * count / total)
        return kind

    def learn(self, kind: int, right: bool) -> None:
        self._tried[kind] += 1
        self._right[kind] += right
        if self._tried[kind] > _FORGET_AT:
            self._tried[kind] /= 2
            self._right[kind] /= 2


class _Expected(NamedTuple):
    """kinds: of each guess; expected: how many will be right, on average."""

    guess: Guess
    kinds: Seq[int]
    expected: float


_NOTHING: Final = _Expected(Guess((), (), ()), (), 0.0)


class _Place:
    """Where a sequence stands in one text that is not its own."""

    __slots__ = ("automaton", "match_len", "source", "state")

    def __init__(self, automaton: SuffixAutomaton, source: int) -> None:
        self.automaton = automaton
        self.source = source
        self.state, self.match_len = ROOT, 0

    def follow(self, token_ids: Seq[int]) -> None:
        automaton = self.automaton
        state, match_len, step = self.state, self.match_len, automaton.step
        # The text may have grown meanwhile and its states been split: stand where we match.
        while state != ROOT and match_len <= automaton.length[automaton.link[state]]:
            state = automaton.link[state]
        for token_id in token_ids:
            state, match_len = step(state, match_len, token_id)
        self.state, self.match_len = state, match_len


class _Sequence:
    """One sequence: its own text's automaton, its places elsewhere, what was guessed last."""

    def __init__(
        self, salt: str, num_prompt: int, prediction_ids: Seq[int], corpora: Corpora
    ) -> None:
        self._salt = salt
        self._num_prompt = num_prompt
        self.text = SuffixAutomaton()
        self.num_known = 0
        self.places: list[_Place] = []
        self._generations: list[SuffixAutomaton] = []
        self._corpora = corpora
        self.guessed = _NOTHING
        if prediction_ids:
            prediction = SuffixAutomaton()
            prediction.extend([SEPARATOR, *prediction_ids])
            place = _Place(prediction, _PREDICTION)
            place.follow([SEPARATOR])  # the output is expected to begin as the prediction does
            self.places.append(place)

    def extend(self, token_ids: Seq[int]) -> None:
        """Tokens at positions num_known and on."""
        self.text.extend(token_ids)
        output = token_ids[max(0, self._num_prompt - self.num_known) :]
        self.num_known += len(token_ids)
        self._refresh_places()
        for place in self.places:
            if place.source == _PREDICTION:  # of the output alone; past outputs follow prompts, too
                place.follow(output)
            else:
                if len(token_ids) > _LONGEST:
                    place.state, place.match_len = ROOT, 0  # what is skipped breaks the match
                place.follow(token_ids[-_LONGEST:])

    def _refresh_places(self) -> None:
        generations = self._corpora.generations(self._salt)
        if generations is self._generations:
            return
        known = {id(place.automaton): place for place in self.places}
        self.places = [place for place in self.places if place.source == _PREDICTION]
        self.places += [known.get(id(a)) or _Place(a, _PAST) for a in generations]
        self._generations = generations

    def contexts(self) -> list[_Place]:
        """Its own text first, then other texts that match longer."""
        own = _Place(self.text, _TEXT)
        own.state, own.match_len = self.text.match, self.text.match_len
        longer = max(own.match_len, 1)
        others = [
            place
            for place in self.places
            if place.match_len > (0 if place.source == _PREDICTION else longer)
        ]
        return [own, *others] if own.match_len else others


class SuffixGuesser:
    """corpus_tokens: of past output, all salts together."""

    def __init__(self, corpus_tokens: int) -> None:
        self._corpora = Corpora(corpus_tokens)
        self._sequences: dict[int, _Sequence] = {}
        self._experience = _Experience()

    @property
    def num_corpus_tokens(self) -> int:
        """Tokens of past output held now."""
        return self._corpora.num_tokens

    def add(self, seq_id: int, salt: str, num_prompt: int, prediction_ids: Seq[int]) -> None:
        """A sequence of which nothing is known yet. A known one begins anew."""
        self._sequences[seq_id] = _Sequence(salt, num_prompt, prediction_ids, self._corpora)

    def forget(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)

    def read_output(self, salt: str, token_ids: Seq[int]) -> None:
        """The whole output of a sequence that ended."""
        self._corpora.add(salt, token_ids)

    def guess(self, asks: Seq[Ask]) -> list[Guess]:
        """One per ask; the sequences must have been added."""
        return [self._guess(ask) for ask in asks]

    def _guess(self, ask: Ask) -> Guess:
        seq = self._sequences[ask.seq_id]
        self._learn(seq.guessed, ask.token_ids)
        if ask.token_ids:
            seq.extend(ask.token_ids)
        best = _NOTHING
        for place in seq.contexts():
            found = self._expand(place, ask.max_tokens, ask.width)
            if best is _NOTHING or found.expected > best.expected:
                best = found
        seq.guessed = best
        return best.guess

    def _expand(self, place: _Place, max_tokens: int, width: int) -> _Expected:
        if width == 1:
            return self._chain(place, max_tokens)
        return self._tree(place, max_tokens, width)

    def _chain(self, place: _Place, max_tokens: int) -> _Expected:
        automaton, experience = place.automaton, self._experience
        state, match_len, survival, expected = place.state, place.match_len, 1.0, 0.0
        token_ids, kinds, scores = list[int](), list[int](), list[float]()
        while len(token_ids) < max_tokens:
            state, match_len, token_id = _expected_next(automaton, state, match_len)
            if token_id < 0:
                break
            count, total = automaton.share(state, token_id)
            kind = experience.kind(place.source, match_len, count, total)
            rate = experience.rate(kind)
            survival *= rate
            if survival < _HOPELESS:
                break
            token_ids.append(token_id)
            kinds.append(kind)
            scores.append(rate)
            expected += survival
            state = automaton.transitions[state][token_id]
            match_len += 1
        parents = range(-1, len(token_ids) - 1)
        return _Expected(Guess(tuple(token_ids), tuple(parents), tuple(scores)), kinds, expected)

    def _tree(self, place: _Place, max_tokens: int, width: int) -> _Expected:
        """Best first: the guesses most likely to survive, at most `width` children each."""
        automaton, experience = place.automaton, self._experience
        token_ids, parents = list[int](), list[int]()
        kinds, scores, expected = list[int](), list[float](), 0.0
        # (-survival, tie, parent, token, kind, rate, state, match length), all of candidates
        frontier: list[tuple[float, int, int, int, int, float, int, int]] = []
        num_candidates = 0

        def offer(parent: int, survival: float, state: int, match_len: int) -> None:
            nonlocal num_candidates
            state, match_len, first = _expected_next(automaton, state, match_len)
            if first < 0:
                return
            for token_id in _likeliest(automaton, state, first, width):
                count, total = automaton.share(state, token_id)
                kind = experience.kind(place.source, match_len, count, total)
                rate = experience.rate(kind)
                if survival * rate < _HOPELESS:
                    continue
                target = automaton.transitions[state][token_id]
                entry = (-survival * rate, num_candidates, parent, token_id, kind, rate)
                heapq.heappush(frontier, (*entry, target, match_len + 1))
                num_candidates += 1

        offer(-1, 1.0, place.state, place.match_len)
        while frontier and len(token_ids) < max_tokens:
            loss, _, parent, token_id, kind, rate, state, match_len = heapq.heappop(frontier)
            token_ids.append(token_id)
            parents.append(parent)
            kinds.append(kind)
            scores.append(rate)
            expected -= loss
            offer(len(token_ids) - 1, -loss, state, match_len)
        return _Expected(Guess(tuple(token_ids), tuple(parents), tuple(scores)), kinds, expected)

    def _learn(self, expected: _Expected, emitted: Seq[int]) -> None:
        """Walk what was emitted through what was guessed, whoever's guesses were verified."""
        token_ids, parents, _ = expected.guess
        node, depth = -1, 0
        for idx, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
            if parent != node or depth >= len(emitted):
                continue
            right = token_id == emitted[depth]
            self._experience.learn(expected.kinds[idx], right)
            if right:
                node, depth = idx, depth + 1


def _expected_next(automaton: SuffixAutomaton, state: int, match_len: int) -> tuple[int, int, int]:
    """(context, its length, the token to expect), in the longest context that knows one.

    The end of a text has nothing behind it: a shorter context has, and a loop goes on looping.
    """
    while state != ROOT:
        token_id = automaton.best[state]
        if token_id >= 0:
            return state, match_len, token_id
        state = automaton.link[state]
        match_len = automaton.length[state]
    return ROOT, 0, -1


def _likeliest(automaton: SuffixAutomaton, state: int, first: int, width: int) -> list[int]:
    """The token to expect after a context and the next likeliest, no separators."""
    others = [token for token in automaton.transitions[state] if token not in (first, SEPARATOR)]
    if len(others) > 1:
        others.sort(key=lambda token: automaton.share(state, token)[0], reverse=True)
    return [first, *others[: width - 1]]
