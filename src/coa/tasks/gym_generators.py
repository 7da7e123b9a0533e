"""The reasoning-gym generators of the set `gym-code`, each with its fixed configuration.

Chosen because a short program solves their problems and guessing does not satisfy their verifiers;
`docs/gym.md` lists those that accept more than the right answer, and the generators left out, with
the reason. Configurations are modest: a question has a few hundred characters and its answer a line
or a small grid. They are part of a task's identity, so changing one makes other tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Generator:
    """One generator of the package: where it belongs and how it is configured."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    held_out: bool = False
    """Whether it is kept for the split `heldout_generator`, and never trained on."""


def _train(kind: str, **config: Any) -> Generator:
    return Generator(kind, config)


def _held_out(kind: str, **config: Any) -> Generator:
    return Generator(kind, config, held_out=True)


# Not all calendar questions can be answered: two of its kinds leave the year out or print a wrong
# one. Of the time intervals only dates do not depend on the day on which they are made.
_CALENDAR = ["weekday_offset", "weekday_of_date", "recurring_event_day", "count_days"]

GENERATORS: dict[str, Generator] = {
    "basic_arithmetic": _train("arithmetic", max_terms=4, max_digits=3),
    "calendar_arithmetic": _train("arithmetic", tasks=[*_CALENDAR, "is_leap_year"]),
    "chain_sum": _train("arithmetic", max_terms=5, max_digits=4),
    "count_bits": _train("arithmetic", max_n=1_000_000),
    "decimal_arithmetic": _train("arithmetic", max_terms=4),
    "dice": _train("arithmetic", num_dice=3, max_dice_size=12),
    "fraction_simplification": _train("arithmetic", max_factor=50),
    "gcd": _train("arithmetic", max_numbers=3),
    "leg_counting": _train("arithmetic", max_animals=5),
    "number_format": _train("arithmetic", max_num_candidates=4, max_n=1_000_000),
    "prime_factorization": _train("arithmetic", max_value=5000),
    "products": _train("arithmetic", max_terms=3, max_digits=4),
    "time_intervals": _train("arithmetic", task_types=["date"], max_date_difference_days=1000),
    "bitwise_arithmetic": _held_out("arithmetic", difficulty=2),
    "decimal_chain_sum": _held_out("arithmetic", max_terms=4),
    "lcm": _held_out("arithmetic", max_numbers=3),
    "power_function": _held_out("arithmetic", min_exponent=1, max_exponent=6),
    "complex_arithmetic": _train("algebra"),
    "simple_equations": _train("algebra"),
    "ab": _train("algorithmic", length=8),
    "base_conversion": _train("algorithmic", min_value=1, max_value=5000),
    "binary_matrix": _train("algorithmic", max_n=4),
    "caesar_cipher": _train("algorithmic", min_words=6, max_words=12),
    "count_primes": _train("algorithmic", max_n=500),
    "game_of_life": _train("algorithmic", grid_size_x=5, grid_size_y=5, filled_cells=12),
    "jugs": _train("algorithmic", difficulty=3),
    "letter_counting": _train("algorithmic", max_words=10),
    "manipulate_matrix": _train("algorithmic", max_rows=4, max_cols=4, max_transforms=3),
    "number_filtering": _train("algorithmic", max_numbers=8, max_decimals=2),
    "number_sorting": _train("algorithmic", max_numbers=8),
    "palindrome_generation": _train("algorithmic", min_length=5, max_length=12),
    "palindrome_partitioning": _train("algorithmic", max_string_len=8),
    "pool_matrix": _train("algorithmic", max_rows=4, max_cols=4, min_pool_size=2),
    "rotate_matrix": _train("algorithmic", max_n=5),
    "rotten_oranges": _train("algorithmic", min_n=3, max_n=4, p_rotten=0.2),
    "spell_backward": _train("algorithmic"),
    "string_insertion": _train("algorithmic"),
    "word_sorting": _train("algorithmic", max_words=8),
    "binary_alternation": _held_out("algorithmic", max_n=20),
    "group_anagrams": _held_out("algorithmic", max_anagram_groups=4, max_words_per_group=3),
    "spiral_matrix": _held_out("algorithmic", max_n=4),
    "word_sequence_reversal": _held_out("algorithmic"),
    "bf": _train("code"),
    # In a smaller maze there is sometimes one passage only, and its generator never ends.
    "maze": _train("games", min_grid_size=7, max_grid_size=7, max_dist=8),
    "mini_sudoku": _train("games"),
    "n_queens": _held_out("games", n=7, min_remove=3, max_remove=5),
    "advanced_geometry": _train("geometry"),
    "simple_geometry": _held_out("geometry"),
    "largest_island": _train("graphs", min_rows=4, max_rows=5, min_cols=4, max_cols=5),
    "quantum_lock": _train("graphs", difficulty=4),
    "shortest_path": _train("graphs", min_rows=4, max_rows=5, min_cols=4, max_cols=5),
    "course_schedule": _held_out("graphs", max_num_courses=7),
    "self_reference": _train("logic"),
}

WITHOUT_FACTS = frozenset(["ab", "decimal_arithmetic", "game_of_life", "self_reference"])
"""Generators whose metadata do not tell the problem. Each has one wording: the text tells it."""
