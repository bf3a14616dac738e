"""A suffix automaton with counts: every run of tokens of a text, and what followed it.

Built online, amortised O(1) per token, at most 2n states for n tokens (Blumer et al. 1985). A state
stands for runs with the same ends; its transitions are the tokens that ever followed them. Counts
are kept as in PPM with update exclusion: a token is counted in the longest context that already
knew it, which is one dictionary update per token and predicts better than counting everywhere.

Rejected: a trie of all suffixes up to a depth (memory n * depth), positions by n-gram hash (every
length of match is another table).
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0


class SuffixAutomaton:
    """States are numbers; ROOT is the empty context.

    transitions[s]: token -> state
    link[s]:        the longest shorter context with other ends
    length[s]:      of the longest run that the state stands for
    best[s]:        the token to expect after s: most often seen, the latest among equals; -1: none
    """

    __slots__ = ("_extra", "_last", "best", "length", "link", "match", "match_len", "transitions")

    def __init__(self) -> None:
        self.transitions: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.best = [-1]
        self._extra: dict[int, dict[int, int]] = {}  # occurrences of s, token beyond the first
        self._last = ROOT
        # The longest suffix of the text that stood in it before, as a state and a length.
        self.match = ROOT
        self.match_len = 0

    @property
    def num_tokens(self) -> int:
        return self.length[self._last]

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._count(token_id)
            self._append(token_id)

    def step(self, state: int, match_len: int, token_id: int) -> tuple[int, int]:
        """Where a match goes when `token_id` follows it: the longest suffix that is known."""
        transitions, link, length = self.transitions, self.link, self.length
        while True:
            target = transitions[state].get(token_id)
            if target is not None:
                return target, match_len + 1
            if state == ROOT:
                return ROOT, 0
            state = link[state]
            match_len = length[state]

    def share(self, state: int, token_id: int) -> tuple[int, int]:
        """(times this token was counted after `state`, times any was), both at least 1."""
        num_kinds = len(self.transitions[state])
        extra = self._extra.get(state)
        if extra is None:
            return 1, num_kinds
        return 1 + extra.get(token_id, 0), num_kinds + sum(extra.values())

    def _count(self, token_id: int) -> None:
        """Count the token in its longest known context, and move the text's own match on."""
        transitions, link, length = self.transitions, self.link, self.length
        state, match_len = self.match, self.match_len
        while (target := transitions[state].get(token_id)) is None:
            if state == ROOT:
                self.match, self.match_len = ROOT, 0
                return
            state = link[state]
            match_len = length[state]
        if state != ROOT:
            counts = self._extra.setdefault(state, {})
            seen = counts[token_id] = counts.get(token_id, 0) + 1
            best = self.best[state]
            if best != token_id and seen >= counts.get(best, 0):
                self.best[state] = token_id
        self.match, self.match_len = target, match_len + 1

    def _append(self, token_id: int) -> None:
        transitions, link, length, best = self.transitions, self.link, self.length, self.best
        new = len(link)
        transitions.append({})
        length.append(length[self._last] + 1)
        best.append(-1)
        link.append(ROOT)
        state = self._last
        self._last = new
        extra = self._extra
        while state >= 0 and token_id not in transitions[state]:
            transitions[state][token_id] = new
            if state not in extra:  # nothing was ever repeated here: expect the latest
                best[state] = token_id
            state = link[state]
        if state < 0:
            return
        old = transitions[state][token_id]
        link[new] = old if length[old] == length[state] + 1 else self._split(state, token_id, old)

    def _split(self, state: int, token_id: int, old: int) -> int:
        """Part of `old`'s runs now ends elsewhere, too: give that part a state of its own."""
        transitions, link, length = self.transitions, self.link, self.length
        clone = len(link)
        transitions.append(dict(transitions[old]))
        length.append(length[state] + 1)
        link.append(link[old])
        self.best.append(self.best[old])
        if old in self._extra:
            self._extra[clone] = dict(self._extra[old])
        link[old] = clone
        if self.match == old and self.match_len <= length[clone]:
            self.match = clone
        while state >= 0 and transitions[state].get(token_id) == old:
            transitions[state][token_id] = clone
            state = link[state]
        return clone
