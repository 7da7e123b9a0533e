"""Editorial choices for `build_atlas_facts.py`: where sources differ, are silent or spell oddly.

Kept apart from the script because these are judgements a reader may want to argue with, and the
script is not.
"""

from __future__ import annotations

DROPPED_COUNTRIES = frozenset("AQ BV HM TF GS UM CS AN IO BQ TK SJ PN CC CX".split())

TERRITORIES = frozenset(
    "AI AS AW AX BL BM CK CW EH FK FO GF GG GI GL GP GU HK IM JE KY MF MO MP MQ MS NC NF NU PF PM "
    "PR RE SH SX TC VG VI WF YT".split()
)

COUNTRY_NAMES = {
    "AX": "Aland Islands",
    "BL": "Saint Barthelemy",
    "CD": "DR Congo",
    "CG": "Republic of the Congo",
    "CI": "Ivory Coast",
    "HK": "Hong Kong",
    "KN": "Saint Kitts & Nevis",
    "LC": "Saint Lucia",
    "MF": "Saint Martin",
    "MM": "Myanmar",
    "MO": "Macao",
    "PM": "Saint Pierre & Miquelon",
    "PS": "Palestine",
    "SH": "Saint Helena",
    "TR": "Turkey",
    "VC": "Saint Vincent & the Grenadines",
    "VI": "US Virgin Islands",
    "XK": "Kosovo",
}

ARTICLE_NAMES = frozenset(
    ["Bahamas", "Central African Republic", "Comoros", "DR Congo", "Dominican Republic", "Gambia",
     "Isle of Man", "Maldives", "Netherlands", "Philippines", "Republic of the Congo", "Seychelles",
     "United Arab Emirates", "United Kingdom", "United States"]
)  # fmt: skip

CAPITALS = {
    "AG": "Saint John's",
    "BL": "Gustavia",
    "CW": "Willemstad",
    "EH": "Laayoune",
    "GD": "Saint George's",
    "GG": "Saint Peter Port",
    "GP": "Basse-Terre",
    "KZ": "Astana",
    "MV": "Male",
    "MS": "Brades",
    "PW": "Melekeok",
    "VA": "Vatican City",
}

CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}
"""Continent names by GeoNames continent code; see `CONTINENT_OF` for the exceptions."""

CONTINENT_OF = {"CY": "Asia", "TL": "Asia"}

REGIONS = {
    "XK": "Southern Europe",
    "Middle Africa": "Central Africa",
    "South-eastern Asia": "Southeast Asia",
    "Northern America": "Northern America",
    "Channel Islands": "Northern Europe",
    "Caribbean": "the Caribbean",
    "Australia and New Zealand": "Australasia",
}
"""Region by ISO code, or the name we prefer for a region."""

OFFICIAL_LANGUAGES = {
    "AF": ["fa", "ps"],
    "AX": ["sv"],
    "BI": ["rn", "fr", "en"],
    "CH": ["de", "fr", "it", "rm"],
    "DZ": ["ar", "ber"],
    "HK": ["zh", "en"],
    "IL": ["he"],
    "KM": ["ar", "fr", "zdj"],
    "LI": ["de"],
    "MA": ["ar", "ber"],
    "MO": ["zh", "pt"],
    "MR": ["ar"],
    "NO": ["no"],
    "SN": ["fr"],
    "TN": ["ar"],
    "TW": ["zh"],
    "UA": ["uk"],
    "VA": ["it", "la"],
    "IQ": ["ar", "ku"],
    "ZA": ["af", "en", "nr", "nso", "st", "ss", "ts", "tn", "ve", "xh", "zu"],
}

LANGUAGE_NAMES = {
    "ber": "Berber",
    "bn": "Bengali",
    "dv": "Dhivehi",
    "kl": "Greenlandic",
    "mi": "Maori",
    "na": "Nauruan",
    "ny": "Chichewa",
    "rn": "Kirundi",
    "st": "Sesotho",
    "ti": "Tigrinya",
    "tvl": "Tuvaluan",
    "zdj": "Comorian",
}

LANGUAGE_FAMILIES = {
    name: family
    for family, names in {
        "Afro-Asiatic": "Amharic,Arabic,Berber,Hebrew,Maltese,Somali,Tigrinya",
        "Austroasiatic": "Khmer,Vietnamese",
        "Austronesian": "Chamorro,Fijian,Filipino,Gilbertese,Hiri Motu,Indonesian,Malagasy,Malay,"
        "Maori,Marshallese,Nauruan,Niuean,Palauan,Samoan,Tahitian,Tetum,Tongan,Tuvaluan",
        "Aymaran": "Aymara",
        "Dravidian": "Tamil",
        "Eskimo-Aleut": "Greenlandic",
        "English-based creole": "Bislama,Tok Pisin",
        "French-based creole": "Haitian Creole",
        "Indo-European": "Afrikaans,Albanian,Armenian,Belarusian,Bengali,Bosnian,Bulgarian,Catalan,"
        "Croatian,Czech,Danish,Dhivehi,Dutch,English,Faroese,Fiji Hindi,French,German,Greek,Hindi,"
        "Icelandic,Irish,Italian,Kurdish,Latin,Latvian,Lithuanian,Luxembourgish,Macedonian,Manx,"
        "Nepali,Norwegian,Pashto,Persian,Polish,Portuguese,Romanian,Romansh,Russian,Serbian,"
        "Sinhala,Slovak,Slovenian,Spanish,Swedish,Tajik,Ukrainian,Urdu",
        "Japonic": "Japanese",
        "Kartvelian": "Georgian",
        "Koreanic": "Korean",
        "Kra-Dai": "Lao,Thai",
        "Mongolic": "Mongolian",
        "Ngbandi-based creole": "Sango",
        "Niger-Congo": "Chichewa,Comorian,Kinyarwanda,Kirundi,North Ndebele,Northern Sotho,Sesotho,"
        "Shona,South Ndebele,Swahili,Swati,Tsonga,Tswana,Venda,Wolof,Xhosa,Yoruba,Zulu",
        "Portuguese-based creole": "Papiamento",
        "Quechuan": "Quechua",
        "Sino-Tibetan": "Burmese,Chinese,Dzongkha",
        "Tupian": "Guarani",
        "Turkic": "Azerbaijani,Kazakh,Kyrgyz,Turkish,Turkmen,Uzbek",
        "Uralic": "Estonian,Finnish,Hungarian",
    }.items()
    for name in names.split(",")
}

CURRENCY_NAMES = {
    "AFN": "Afghan afghani",
    "BAM": "Bosnian mark",
    "GYD": "Guyanese dollar",
    "KGS": "Kyrgyz som",
    "SHP": "Saint Helena pound",
    "STN": "Sao Tome dobra",
    "TTD": "Trinidad dollar",
    "XCG": "Caribbean guilder",
    "ZWG": "Zimbabwean gold",
}

ZERO_DECIMALS = frozenset("BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX VND VUV XAF XOF XPF".split())
THREE_DECIMALS = frozenset("BHD IQD JOD KWD LYD OMR TND".split())

AREAS = {"RS": 77500}
CALLING_CODES = {"XK": "+383"}
DOMAINS = {"GB": ".uk", "XK": ".xk"}

BORDERS_ADDED = [("BW", "ZM"), ("CN", "HK"), ("CN", "MO")]
BORDERS_DROPPED = [("AL", "RS"), ("CU", "US")]

DROPPED_CITIES = frozenset(
    ["Brooklyn", "Queens", "Manhattan", "The Bronx", "Staten Island", "Delhi", "Of", "Same", "Most"]
)
"""Boroughs, a city that contains a capital, and names that are ordinary words of a question."""

ELEMENT_CATEGORIES = {
    "Actinides": "actinide",
    "Alkali metals": "alkali metal",
    "Alkaline earth metals": "alkaline earth metal",
    "Halogens": "halogen",
    "Lanthanides": "lanthanide",
    "Metalloids": "metalloid",
    "Noble gases": "noble gas",
    "Nonmetals": "reactive nonmetal",
    "Poor metals": "post-transition metal",
    "Transition metals": "transition metal",
}

ELEMENT_YEARS = {"Neodymium": 1885, "Radon": 1899, "Platinum": 0}

ANCIENT_OR_UNSURE_PLACE = frozenset(["Platinum", "Nobelium"])
