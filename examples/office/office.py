"""The tools of an office: customers, their invoices by year, and policies.

Everything in it is made from a fixed seed, so that the same call returns the same text on every
machine. What cannot be found raises a LookupError, as a function of yours would.
"""

import random
from dataclasses import dataclass
from typing import Literal

Currency = Literal["USD", "GBP", "CHF", "SEK", "JPY"]
RATES = {"USD": 1.08, "GBP": 0.86, "CHF": 0.96, "SEK": 11.2, "JPY": 160.0}
"""What one euro is worth."""
YEARS = range(2008, 2026)

_FIRST = """Alder Amber Anchor Arbor Ash Aspen Atlas Bailey Barley Beacon Birch Bishop Blue Boulder
Brandt Bridge Bright Brook Canyon Carter Cedar Chapel Cherry Clover Coast Cobalt Copper Coral
Cotton Crane Crown Dale Delta Dover Eagle East Echo Elm Ember Falcon Fern Field Finch Flint Forest
Foster Fox Garden Glen Granite Green Grove Hale Harbor Hawk Hazel Heron Hill Holly Hudson Iris Iron
Ivy Jasper Juniper Kent Kings Lake Lark Laurel Lemon Liberty Lime Linden Lion Lotus Lunar Maple
Marble Market Mason Meadow Mercer Mill Mint Moon Moss Noble North Oak Ocean Olive Onyx Orchard Otter
Owl Palm Park Pearl Pepper Pine Plum Porter Quarry Quill Raven Red Ridge River Robin Rose Sage Salt
Shore Silver Sparrow Spring Star Stone Summit Sun Swan Thistle Thorn Tiger Tower Valley Velvet
Violet Walnut Water West Willow Wind Winter Wolf Wren York""".split()
_TRADES = """Bakery Books Brewery Builders Cafe Catering Cleaning Clinic Dairy Dental Design Farms
Film Florists Foods Freight Furniture Glass Hotel Labs Law Logistics Motors Music Optics Paper
Pharmacy Plumbing Press Print Roofing School Shipping Software Sports Studio Textiles Tools Toys
Travel""".split()
CITIES = """Ghent Lyon Porto Turin Basel Leeds Malmo Graz Cork Bergen Aachen Krakow Bilbao Tartu
Bremen Nantes Parma Utrecht Zagreb Aarhus Dundee Geneva Lille Murcia Odense Padua Riga Salzburg
Tampere Verona""".split()
GROUPS = tuple(
    """gold silver bronze copper iron tin zinc nickel amber pearl jade ruby opal coral""".split()
)
"""Price groups of customers; each has a policy that says its discount."""
_LIMITS = {
    "EUR": """hotel nights/taxi rides/client dinners/team lunches/office chairs/headsets/phones/
        train tickets/rental cars/gifts to clients/conference tickets/books/software licences/
        moving costs/parking/home office desks/monitors/bicycles/language courses/catering""",
    "days": """annual leave/sick notes/travel reports/expense claims/invoice payment/complaints/
        parental leave/moving house/jury duty/training/visa requests/password changes/
        contract reviews/equipment returns/probation reviews""",
    "months": """document storage/warranty claims/email archives/camera footage/visitor lists/
        data backups/supplier reviews/fire drills/safety checks/price reviews""",
}
"""Unit -> topics of policies that set a limit in it."""


@dataclass(frozen=True, slots=True)
class Customer:
    """A customer of the office and what it paid, in euros, by year."""

    name: str
    city: str
    group: str
    invoices: dict[int, int]


def _customers() -> dict[str, Customer]:
    chance = random.Random("office: customers")
    made = {}
    for first in _FIRST:
        for trade in chance.sample(_TRADES, 3):
            # Not every customer bought something in every year.
            years = sorted(chance.sample(YEARS, 14))
            invoices = {year: chance.randrange(20, 980) * 10 for year in years}
            name = f"{first} {trade}"
            made[name] = Customer(name, chance.choice(CITIES), chance.choice(GROUPS), invoices)
    return made


def _policies() -> dict[str, str]:
    chance = random.Random("office: policies")
    made = {}
    for unit, topics in _LIMITS.items():
        for topic in map(str.strip, topics.split("/")):
            limit = chance.randrange(2, 60) * (5 if unit == "EUR" else 1)
            made[topic] = f"Policy on {topic}: the limit is {limit} {unit}."
    for group, percent in zip(GROUPS, chance.sample(range(2, 31), len(GROUPS)), strict=True):
        text = f"Policy on discounts for {group} customers: the discount is {percent} percent."
        made[f"discounts for {group} customers"] = text
    return made


CUSTOMERS = _customers()
POLICIES = _policies()
"""Topic -> what the policy says."""


def _known(name: str) -> Customer:
    try:
        return CUSTOMERS[name.strip()]
    except KeyError:
        raise LookupError(f"no customer is called {name!r}") from None


def find_customer(name: str) -> str:
    """Look up a customer: the city it is in and its price group.

    Args:
        name: the full name of the customer
    """
    found = _known(name)
    return f"{found.name} is in {found.city} and has the price group {found.group}."


def search_policy(query: str) -> str:
    """Search the policies of the office and return the one that fits best.

    Args:
        query: a few words that the policy is about
    """
    words = set(query.lower().replace("?", " ").split())
    shared = {topic: len(words & set(topic.split())) for topic in POLICIES}
    best = max(shared, key=lambda topic: (shared[topic], -len(topic)))
    if not shared[best]:
        raise LookupError(f"no policy is about {query!r}")
    return POLICIES[best]


def lookup_invoice(customer: str, year: int) -> str:
    """Look up what a customer paid in a year, in euros.

    Args:
        customer: the full name of the customer
        year: the year of the invoice
    """
    found = _known(customer)
    if year not in found.invoices:
        raise LookupError(f"{found.name} has no invoice for {year}")
    return f"{found.invoices[year]} EUR"


def convert(amount: float, currency: Currency) -> str:
    """Convert an amount in euros into another currency.

    Args:
        amount: the amount in euros
        currency: the currency that is wanted
    """
    if currency not in RATES:
        raise LookupError(f"no rate for {currency!r}")
    return f"{amount * RATES[currency]:.2f} {currency}"


def deduct(amount: float, percent: float) -> str:
    """Take a discount off an amount in euros.

    Args:
        amount: the amount in euros
        percent: the discount in percent
    """
    return f"{amount * (100 - percent) / 100:.2f} EUR"


def add(first: float, second: float) -> str:
    """Add two amounts in euros.

    Args:
        first: an amount in euros
        second: another amount in euros
    """
    return f"{first + second:g} EUR"


tools = [find_customer, search_policy, lookup_invoice, convert, deduct, add]
"""All of them, for an environment: tools = ["office:tools"]."""
