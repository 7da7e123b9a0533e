"""Programs for words, strings and lists."""

from __future__ import annotations

import re

from coa.environments.gym.plans import (
    LIST,
    SENTENCE,
    WHOLE,
    WORD,
    WORDS,
    ProgramPlan,
    Recognisers,
)

TEXTS = Recognisers()


@TEXTS.add("spell_backward", r"Spell this word backward \(example: sun -> nus\): (\w+)")
def _backward(found: re.Match[str]) -> ProgramPlan:
    steps = ("Reverse the word.", "Print it.")
    return ProgramPlan(steps, "I use a slice.", f'print("{found[1]}"[::-1])', WORD)


@TEXTS.add(
    "letter_counting", r'How many times does the letter "(\w)" appear in the text: "([\w ]+)"\?'
)
def _letters(found: re.Match[str]) -> ProgramPlan:
    program = f'text = "{found[2]}"\nprint(text.lower().count("{found[1]}"))'
    steps = ("Write the text in lower case.", "Count the letter.")
    return ProgramPlan(steps, "I use count.", program, WHOLE)


@TEXTS.add("word_sequence_reversal", r".*Reverse this list of words: (\w+(?:, \w+)*)")
def _reversal(found: re.Match[str]) -> ProgramPlan:
    program = f'words = "{found[1]}".split(", ")\nprint(", ".join(words[::-1]))'
    steps = ("Split the words.", "Print them in reverse order.")
    return ProgramPlan(steps, "I use a slice.", program, WORDS)


@TEXTS.add("word_sorting", r".*sort these words in (\w+) order .*: (\w+(?:, \w+)*)")
def _sorting(found: re.Match[str]) -> ProgramPlan:
    order = ", reverse=True" if found[1] == "descending" else ""
    program = f'words = "{found[2]}".split(", ")\nprint(", ".join(sorted(words{order})))'
    steps = ("Split the words.", f"Print them in {found[1]} order.")
    return ProgramPlan(steps, "I use sorted.", program, WORDS)


@TEXTS.add("number_sorting", r"Sort these numbers in (ascending|descending) order: ([-\d., ]+)\n.*")
def _number_sorting(found: re.Match[str]) -> ProgramPlan:
    order = ", reverse=True" if found[1] == "descending" else ""
    program = f"numbers = [{found[2]}]\nprint([str(n) for n in sorted(numbers{order})])"
    steps = (f"Sort the numbers in {found[1]} order.", "Print them as strings.")
    return ProgramPlan(steps, "I use sorted.", program, LIST)


_KEPT = {
    ("Keep", "larger"): ">",
    ("Keep", "smaller"): "<",
    ("Remove", "larger"): "<=",
    ("Remove", "smaller"): ">=",
}


@TEXTS.add(
    "number_filtering",
    r"(Keep|Remove) all numbers (larger|smaller) than (-?[\d.]+) in this list: "
    r"(\[[-'\d., ]+\])\n.*",
)
def _filtering(found: re.Match[str]) -> ProgramPlan:
    kept = _KEPT[found[1], found[2]]
    program = f"numbers = {found[4]}\nprint([n for n in numbers if float(n) {kept} {found[3]}])"
    steps = ("Read every string as a number.", f"Keep those that are {kept} {found[3]}.")
    return ProgramPlan(steps, f"I keep what is {kept} {found[3]}.", program, LIST)


@TEXTS.add(
    "palindrome_generation",
    r".*form a valid palindrome using the following letters: ([a-z](?:, [a-z])*)",
)
def _palindrome(found: re.Match[str]) -> ProgramPlan:
    program = (
        f'letters = "{found[1].replace(", ", "")}"\n'
        "kinds = sorted(set(letters))\n"
        'half = "".join(c * (letters.count(c) // 2) for c in kinds)\n'
        'middle = "".join(c for c in kinds if letters.count(c) % 2)\n'
        "print(half + middle + half[::-1])"
    )
    steps = ("Put half of each letter on the left.", "Put the odd letter in the middle.", "Mirror.")
    return ProgramPlan(steps, "I count each letter.", program, WORD)


@TEXTS.add(
    "palindrome_partitioning", r".*Partition the following string into palindromes: ([a-z]+)"
)
def _partitions(found: re.Match[str]) -> ProgramPlan:
    program = (
        "import json\n"
        "def parts(s):\n"
        "    found = [] if s else [[]]\n"
        "    for i in range(1, len(s) + 1):\n"
        "        if s[:i] == s[:i][::-1]:\n"
        "            found += [[s[:i]] + rest for rest in parts(s[i:])]\n"
        "    return found\n"
        f'print(json.dumps(parts("{found[1]}")))'
    )
    steps = ("Try every palindrome at the start.", "Partition the rest in the same way.")
    return ProgramPlan(steps, "I use recursion.", program, LIST)


@TEXTS.add("group_anagrams", r'.*Group the following .* anagrams:\n(\["[a-z]+"(?:, "[a-z]+")*\])')
def _anagrams(found: re.Match[str]) -> ProgramPlan:
    program = (
        "import json\n"
        f"words = {found[1]}\n"
        "groups = {}\n"
        "for word in words:\n"
        '    groups.setdefault("".join(sorted(word)), []).append(word)\n'
        "print(json.dumps(list(groups.values())))"
    )
    steps = ("Sort the letters of each word.", "Group words with the same letters.")
    return ProgramPlan(steps, "Anagrams have the same sorted letters.", program, LIST)


@TEXTS.add("string_insertion", r".*inserting the characters according to the pattern: ([A-E]+)")
def _insertion(found: re.Match[str]) -> ProgramPlan:
    program = (
        "import re\n"
        f's = "{found[1]}"\n'
        'print(re.sub("ABCD|BCDE|CDEA|DEAB|EABC", lambda m: m[0] + m[0][0], s))'
    )
    steps = ("Find the five patterns from left to right.", "After each, insert its first letter.")
    return ProgramPlan(steps, "Each rule repeats the first letter.", program, WORD)


@TEXTS.add("binary_alternation", r".*following binary string alternating: ([01]+)")
def _alternation(found: re.Match[str]) -> ProgramPlan:
    program = (
        f's = "{found[1]}"\n'
        'goals = [(pair * len(s))[:len(s)] for pair in ("01", "10")]\n'
        "goals = [g for g in goals if sorted(g) == sorted(s)]\n"
        "swaps = [sum(a != b for a, b in zip(s, g)) // 2 for g in goals]\n"
        "print(min(swaps, default=-1))"
    )
    steps = ("Write the two alternating strings.", "Each swap repairs two wrong places.")
    return ProgramPlan(steps, "I compare with both goals.", program, WHOLE)


@TEXTS.add("caesar_cipher", r"Decrypt this Caesar cipher text: ([A-Z ]+)\. .*")
def _caesar(found: re.Match[str]) -> ProgramPlan:
    program = (
        f'text = "{found[1]}"\n'
        "def shift(k):\n"
        '    letters = [chr((ord(c) - 65 + k) % 26 + 65) if c != " " else c for c in text]\n'
        '    return "".join(letters)\n'
        "def english(k):\n"
        '    return sum((c in "ETAOINSHR") - 3 * (c in "JQXZ") for c in shift(k))\n'
        "print(shift(max(range(26), key=english)))"
    )
    steps = ("Try all 26 shifts.", "Print the one with the most common and fewest rare letters.")
    return ProgramPlan(steps, "English has many E and T, few J and Q.", program, SENTENCE)


@TEXTS.add("ab", r"A::B is a system.*following program:\s+((?:[AB]#|#[AB])(?: [AB]#| #[AB])*)\s.*")
def _ab(found: re.Match[str]) -> ProgramPlan:
    program = (
        f't = "{found[1]}".split()\n'
        "i = 0\n"
        "while i + 1 < len(t):\n"
        "    a, b = t[i], t[i + 1]\n"
        '    if a[1] == "#" and b[0] == "#":\n'
        "        t[i:i + 2] = [] if a[0] == b[1] else [b, a]\n"
        "        i = -1\n"
        "    i += 1\n"
        "print(*t)"
    )
    steps = ("Find two neighbours that face each other.", "Drop or swap them.", "Start again.")
    return ProgramPlan(steps, "Equal letters vanish, others swap.", program, SENTENCE)


@TEXTS.add("bf", r"[^\n]*Brainf\*ck[^\n]*\n\n([][<>.+-]+)\n\n[^\n]*")
def _brain(found: re.Match[str]) -> ProgramPlan:
    program = (
        f'code = "{found[1]}"\n'
        'does = {">": "p += 1", "<": "p -= 1", "+": "m[p] += 1", "-": "m[p] -= 1"}\n'
        'does |= {".": "out += chr(m[p])", "[": "while m[p]:", "]": "pass"}\n'
        "lines, depth = [], 0\n"
        "for c in code:\n"
        '    lines.append(" " * depth + does[c])\n'
        '    depth += (c == "[") - (c == "]")\n'
        'm, p, out = [0] * 99, 0, ""\n'
        'exec("\\n".join(lines))\n'
        "print(out)"
    )
    steps = ("Turn each sign into a line of Python.", "Run the lines and print the output.")
    return ProgramPlan(steps, "A bracket is a while loop.", program, SENTENCE)
