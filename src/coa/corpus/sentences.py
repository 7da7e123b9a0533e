"""The sentences of the Atlas, as templates.

One table is read by both sides: `atlas.py` fills it in to write pages, `reading.py` turns it into
patterns to read them. A topic has a few variants; a variant is one passage of a sentence or two.
Each sentence names its subject and holds every slot it needs, so it can be understood alone, and
each variant of a topic has the words that a search for its facts would use.
"""

from __future__ import annotations

from collections.abc import Mapping

Variant = tuple[str, ...]

TOPICS: Mapping[str, tuple[Variant, ...]] = {
    "country place": (
        (
            "{subject} is a {kind} in {region}, on the continent of {continent}.",
            "The capital of {subject} is {capital}.",
        ),
        (
            "{subject} lies in {region}, which is a part of the continent of {continent}.",
            "The capital city of {subject} is {capital}.",
        ),
        (
            "{capital} is the capital of {subject}.",
            "{subject} belongs to the continent of {continent} and to the region of {region}.",
        ),
    ),
    "country place without region": (
        (
            "{subject} is a {kind} on the continent of {continent}.",
            "The capital of {subject} is {capital}.",
        ),
        (
            "{subject} lies on the continent of {continent}.",
            "The capital city of {subject} is {capital}.",
        ),
        (
            "{capital} is the capital of {subject}.",
            "{subject} is a part of the continent of {continent}.",
        ),
    ),
    "country size": (
        (
            "The population of {subject} is about {population}.",
            "The area of {subject} is {area} square kilometres.",
        ),
        (
            "{subject} has a population of about {population} and an area of {area} square "
            "kilometres.",
        ),
        (
            "{subject} has an area of {area} square kilometres.",
            "About {population} people make up the population of {subject}.",
        ),
    ),
    "country language": (
        (
            "The official language of {subject} is {languages}.",
            "The currency of {subject} is the {currency}.",
        ),
        ("{subject} has one official language, {languages}, and its currency is the {currency}.",),
        (
            "The {currency} is the currency of {subject}.",
            "{languages} is the only official language of {subject}.",
        ),
    ),
    "country languages": (
        (
            "The official languages of {subject} are {languages}.",
            "The currency of {subject} is the {currency}.",
        ),
        (
            "{subject} has these official languages: {languages}.",
            "The currency used in {subject} is the {currency}.",
        ),
        (
            "The {currency} is the currency of {subject}.",
            "The official languages in {subject} are {languages}.",
        ),
    ),
    "country borders": (
        ("{subject} has land borders with {neighbour_count} neighbours: {neighbours}.",),
        ("{subject} has {neighbour_count} neighbours along its land borders: {neighbours}.",),
        ("The land borders of {subject} touch {neighbour_count} neighbours: {neighbours}.",),
    ),
    "country border": (
        ("{subject} has a land border with {neighbour_count} neighbour: {neighbours}.",),
        ("{subject} has {neighbour_count} neighbour along its land borders: {neighbours}.",),
        ("The land borders of {subject} touch {neighbour_count} neighbour: {neighbours}.",),
    ),
    "country without borders": (
        ("{subject} has no land borders and {neighbour_count} land neighbours.",),
        ("{subject} has {neighbour_count} neighbours by land, as it has no land borders.",),
    ),
    "country codes": (
        ("The calling code of {subject} is {calling_code}, and its internet domain is {domain}.",),
        (
            "Phone numbers in {subject} have the calling code {calling_code}.",
            "The internet domain of {subject} is {domain}.",
        ),
        ("{subject} has the calling code {calling_code} and the internet domain {domain}.",),
    ),
    "country summit": (
        ("The highest point of {subject} is {summit}, at {elevation} metres.",),
        ("At {elevation} metres, {summit} is the highest point of {subject}.",),
        ("{summit}, the highest point of {subject}, rises to {elevation} metres.",),
    ),
    "city place": (
        ("{subject} is a city in {country}.",),
        ("The city of {subject} lies in {country}.",),
        ("{subject} is a city of {country}, on the continent of {continent}.",),
    ),
    "capital place": (
        ("{subject} is the capital city of {capital_of}.",),
        ("The city of {subject} lies in {country}.", "{subject} is the capital of {capital_of}."),
        ("The capital city of {capital_of} is {subject}.",),
    ),
    "city size": (
        ("The population of {subject} is about {population}.",),
        ("{subject} has a population of about {population}.",),
        ("About {population} people make up the population of {subject}.",),
    ),
    "city time": (
        ("{subject} lies at {latitude} degrees {hemisphere}, in the time zone {time_zone}.",),
        ("{subject} is in the time zone {time_zone}, at {latitude} degrees {hemisphere}.",),
    ),
    "currency code": (
        ("The {subject} has the ISO code {currency_code} and {decimals} decimal places.",),
        (
            "The ISO code of the {subject} is {currency_code}.",
            "Amounts in the {subject} are written with {decimals} decimal places.",
        ),
        ("{currency_code} is the ISO code of the {subject}, which has {decimals} decimal places.",),
    ),
    "currency user": (("The {subject} is the currency of one country or territory: {users}.",),),
    "currency users": (
        ("The {subject} is the currency of {user_count} countries and territories: {users}.",),
        ("{user_count} countries and territories use the {subject} as their currency: {users}.",),
    ),
    "currency users part": (
        ("Users of the {subject} as currency, part {part} of {parts}: {users}.",),
        ("The {subject} is a currency used in (list {part} of {parts}): {users}.",),
    ),
    "language family": (
        (
            "{subject} is a language of the {language_family} family.",
            "The ISO code of {subject} is {language_code}.",
        ),
        (
            "The {subject} language belongs to the {language_family} family and has the ISO code "
            "{language_code}.",
        ),
        ("{subject}, ISO code {language_code}, is a language of the {language_family} family.",),
    ),
    "language user": (
        ("{subject} is an official language of one country or territory: {users}.",),
    ),
    "language users": (
        ("{subject} is an official language of {user_count} countries and territories: {users}.",),
        ("{user_count} countries and territories have {subject} as official language: {users}.",),
    ),
    "language users part": (
        ("{subject} as an official language, part {part} of {parts}: {users}.",),
        ("{subject} is an official language in (list {part} of {parts}): {users}.",),
    ),
    "element identity": (
        ("{subject} is a chemical element with the symbol {symbol} and atomic number {number}.",),
        ("The chemical symbol of {subject} is {symbol}, and its atomic number is {number}.",),
        ("{subject}, symbol {symbol}, is the chemical element with the atomic number {number}.",),
    ),
    "element table": (
        (
            "{subject} is {category} in period {period}, {group} of the periodic table.",
            "The atomic mass of {subject} is about {mass}.",
        ),
        (
            "In the periodic table, {subject} is {category} in period {period}, {group}.",
            "{subject} has an atomic mass of about {mass}.",
        ),
    ),
    "element discovery": (
        ("{subject} was discovered in {year}, in {place}.",),
        ("{subject} was first discovered in {year}, in {place}.",),
        ("{subject} was discovered in {place} in the year {year}.",),
    ),
    "element year": (
        ("{subject} was discovered in {year}.",),
        ("{subject} was first discovered in the year {year}.",),
    ),
    "element unknown discovery": (
        ("It is not known when {subject} was discovered.",),
        ("The year when {subject} was discovered is not known.",),
    ),
    "continent count": (
        ("The continent of {subject} has {country_count} countries and territories.",),
        ("There are {country_count} countries and territories on the continent of {subject}.",),
    ),
    "continent part": (
        ("Countries and territories of {subject}, list {part} of {parts}: {countries}.",),
    ),
}
