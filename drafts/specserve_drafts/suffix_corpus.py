"""Past outputs, one corpus per cache salt: text emitted under one salt is never seen by another.

Memory is bounded in tokens over all salts. A salt's corpus is two automata: the newer one grows,
and when it holds half of the budget it becomes the older one and the oldest text is gone. When all
salts together hold more than the budget, the salt that was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from specserve_drafts.suffix_automaton import SuffixAutomaton

SEPARATOR = -1  # between outputs: no token, so no match crosses it and no guess is it


class SaltCorpus:
    """What one salt's requests have emitted, newest generation last."""

    def __init__(self) -> None:
        self.generations: list[SuffixAutomaton] = [SuffixAutomaton()]

    @property
    def num_tokens(self) -> int:
        return sum(automaton.num_tokens for automaton in self.generations)

    def add(self, token_ids: Seq[int], max_tokens: int) -> None:
        newest = self.generations[-1]
        if newest.num_tokens + len(token_ids) > max_tokens // 2 and newest.num_tokens:
            newest = SuffixAutomaton()
            self.generations = [self.generations[-1], newest]
        newest.extend([SEPARATOR, *token_ids[: max_tokens // 2]])


class Corpora:
    """max_tokens: of all salts together."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._by_salt: OrderedDict[str, SaltCorpus] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(corpus.num_tokens for corpus in self._by_salt.values())

    def generations(self, salt: str) -> list[SuffixAutomaton]:
        """The automata that a request with this salt may read; the list itself may change later."""
        corpus = self._by_salt.get(salt)
        if corpus is None:
            return []
        self._by_salt.move_to_end(salt)
        return corpus.generations

    def add(self, salt: str, token_ids: Seq[int]) -> None:
        if not token_ids or self._max_tokens <= 0:
            return
        self._by_salt.setdefault(salt, SaltCorpus()).add(token_ids, self._max_tokens)
        self._by_salt.move_to_end(salt)
        while len(self._by_salt) > 1 and self.num_tokens > self._max_tokens:
            self._by_salt.popitem(last=False)
