"""Unit pairs with exact (or stated) factors: (one unit, many units, one, many, how many of the second make one of the first)."""
from __future__ import annotations

from fractions import Fraction as F

UNITS: tuple[tuple[str, str, str, str, F], ...] = tuple((a, b, c, d, F(f)) for a, b, c, d, f in (
    ("mile", "miles", "kilometre", "kilometres", "1.609344"),
    ("mile", "miles", "metre", "metres", "1609.344"),
    ("yard", "yards", "metre", "metres", "0.9144"),
    ("foot", "feet", "metre", "metres", "0.3048"),
    ("foot", "feet", "centimetre", "centimetres", "30.48"),
    ("foot", "feet", "inch", "inches", "12"),
    ("yard", "yards", "foot", "feet", "3"),
    ("mile", "miles", "foot", "feet", "5280"),
    ("mile", "miles", "yard", "yards", "1760"),
    ("inch", "inches", "centimetre", "centimetres", "2.54"),
    ("inch", "inches", "millimetre", "millimetres", "25.4"),
    ("kilometre", "kilometres", "metre", "metres", "1000"),
    ("metre", "metres", "centimetre", "centimetres", "100"),
    ("metre", "metres", "millimetre", "millimetres", "1000"),
    ("centimetre", "centimetres", "millimetre", "millimetres", "10"),
    ("nautical mile", "nautical miles", "kilometre", "kilometres", "1.852"),
    ("nautical mile", "nautical miles", "metre", "metres", "1852"),
    ("furlong", "furlongs", "metre", "metres", "201.168"),
    ("fathom", "fathoms", "metre", "metres", "1.8288"),
    ("kilogram", "kilograms", "gram", "grams", "1000"),
    ("gram", "grams", "milligram", "milligrams", "1000"),
    ("tonne", "tonnes", "kilogram", "kilograms", "1000"),
    ("pound", "pounds", "kilogram", "kilograms", "0.45359237"),
    ("pound", "pounds", "gram", "grams", "453.59237"),
    ("pound", "pounds", "ounce", "ounces", "16"),
    ("ounce", "ounces", "gram", "grams", "28.349523125"),
    ("stone", "stones", "kilogram", "kilograms", "6.35029318"),
    ("stone", "stones", "pound", "pounds", "14"),
    ("carat", "carats", "gram", "grams", "0.2"),
    ("litre", "litres", "millilitre", "millilitres", "1000"),
    ("litre", "litres", "centilitre", "centilitres", "100"),
    ("cubic metre", "cubic metres", "litre", "litres", "1000"),
    ("gallon", "gallons", "litre", "litres", "3.785411784"),
    ("gallon", "gallons", "quart", "quarts", "4"),
    ("gallon", "gallons", "pint", "pints", "8"),
    ("quart", "quarts", "litre", "litres", "0.946352946"),
    ("pint", "pints", "litre", "litres", "0.473176473"),
    ("pint", "pints", "cup", "cups", "2"),
    ("cup", "cups", "millilitre", "millilitres", "236.5882365"),
    ("tablespoon", "tablespoons", "teaspoon", "teaspoons", "3"),
    ("hour", "hours", "minute", "minutes", "60"),
    ("minute", "minutes", "second", "seconds", "60"),
    ("hour", "hours", "second", "seconds", "3600"),
    ("day", "days", "hour", "hours", "24"),
    ("day", "days", "minute", "minutes", "1440"),
    ("week", "weeks", "day", "days", "7"),
    ("week", "weeks", "hour", "hours", "168"),
    ("year", "years", "month", "months", "12"),
    ("decade", "decades", "year", "years", "10"),
    ("century", "centuries", "year", "years", "100"),
    ("acre", "acres", "square metre", "square metres", "4046.8564224"),
    ("hectare", "hectares", "square metre", "square metres", "10000"),
    ("hectare", "hectares", "acre", "acres", "2.47105"),
    ("square mile", "square miles", "acre", "acres", "640"),
    ("square foot", "square feet", "square inch", "square inches", "144"),
    ("kilobyte", "kilobytes", "byte", "bytes", "1000"),
    ("megabyte", "megabytes", "kilobyte", "kilobytes", "1000"),
    ("gigabyte", "gigabytes", "megabyte", "megabytes", "1000"),
    ("byte", "bytes", "bit", "bits", "8"),
    ("dozen", "dozens", "piece", "pieces", "12"),
    ("kilocalorie", "kilocalories", "kilojoule", "kilojoules", "4.184"),
    ("horsepower", "horsepower", "watt", "watts", "745.69987"),
))

SHORT = {"kilometre": ("km",), "metre": ("m",), "centimetre": ("cm",), "millimetre": ("mm",), "kilogram": ("kg",), "gram": ("g",), "pound": ("lb", "lbs"),
         "ounce": ("oz",), "litre": ("l",), "millilitre": ("ml",), "inch": ("in",), "foot": ("ft",), "hour": ("h",), "minute": ("min",), "second": ("sec",),
         "megabyte": ("MB",), "gigabyte": ("GB",), "kilobyte": ("kB",), "mile": ("mi",)}
AMERICAN = {"metre": "meter", "litre": "liter"}
COUNTS = (*range(1, 13), 15, 20, 25, 50, 100, 200, 500, 1000)


def in_words(value: F) -> str:
    """A rational number with 4 significant digits (half up), without trailing zeros; integers up to 7 digits stay exact."""
    if value.denominator == 1 and value < 10**7:
        return str(value.numerator)
    digits, scaled = 0, value
    while scaled >= 1:
        scaled, digits = scaled / 10, digits + 1
    while scaled < F(1, 10):
        scaled, digits = scaled * 10, digits - 1
    places = 4 - digits
    shift = F(10) ** places
    rounded = F(int(value * shift + F(1, 2))) / shift
    if places <= 0:
        return str(rounded.numerator)
    whole, rest = divmod(rounded * 10**places, 10**places)
    return f"{int(whole)}.{int(rest):0{places}d}".rstrip("0").rstrip(".")
