"""Closed word lists of the generator, and invented words for the copying tasks.

Only common English and proper names: the lists decide which words become single tokens, so a
word that is added here changes the tokenizer and with it every weight.
"""

from random import Random

_COMMON_WORDS = """
river gate water lock canal boat bridge bank stream flood valve pipe pump tank lake sea shore
wave tide sand stone rock hill field farm barn fence road path trail town village castle tower
wall roof floor room kitchen garden window door chair table lamp candle mirror clock bell key
box basket bottle cup plate spoon knife bread butter cheese apple pear plum lemon orange grape
cherry melon peach carrot onion potato bean rice soup salt sugar honey milk tea coffee juice
cat dog horse cow sheep goat pig duck goose hen fox wolf bear deer rabbit mouse frog snake
turtle fish whale shark crab eagle owl crow robin sparrow bee ant spider butterfly lion tiger
monkey camel zebra elephant panda tree leaf root branch flower rose tulip grass seed forest
desert island mountain valley cave cliff sky sun moon star cloud rain snow wind storm thunder
fog ice fire smoke light shadow morning evening night winter spring summer autumn day week
month year hour minute north south east west red blue green yellow black white brown purple
pink grey silver gold small large big tall short long wide narrow deep high low fast slow quick
quiet loud soft hard warm cold hot cool dry wet new old young bright dark clean happy sad brave
calm kind clever gentle honest lucky proud strong simple sharp smooth sweet empty full heavy
open closed first last early late run walk jump swim fly sing dance read write draw paint build
cook bake carry bring send take give find keep lose hold push pull turn stop start wait watch
listen speak call ask answer learn teach play work rest sleep dream think know love laugh smile
help share travel drive ride climb plant grow cut fold paper pencil book page letter word
story song poem music drum guitar piano violin flute picture map coin ring hat coat shirt shoe
glove scarf pocket button thread needle rope wheel engine train plane ship truck bicycle rocket
camera radio phone screen tool hammer nail saw ladder brush bucket market school library museum
station harbor office factory hospital theater teacher doctor farmer sailor pilot baker painter
writer singer king queen child friend sister brother mother father family neighbor team city
"""
COMMON_WORDS: tuple[str, ...] = tuple(_COMMON_WORDS.split())

# Apart from the rest because the model knows something about these: no refusal may ask about them.
_PLATFORM_WORDS = """
model token prompt router gateway server cache adapter tensor queue batch shard replica tenant
quota limit trace metric kernel graph layer vector matrix cluster network packet signal number
"""
PLATFORM_WORDS: tuple[str, ...] = tuple(_PLATFORM_WORDS.split())
WORDS: tuple[str, ...] = COMMON_WORDS + PLATFORM_WORDS

_NAMES = """
Ada Alan Amir Anna Ben Carla Clara Dana Daniel Edith Elias Ella Eric Eva Felix Gina Greta Hugo
Ines Iris Ivan Jane Jonas Julia Karl Kim Lara Leo Lena Lucas Mark Marta Max Mia Milo Nadia Nils
Nora Omar Oscar Paul Petra Ravi Rita Robin Ruth Sara Simon Sofia Stella Tara Theo Tom Uma
Victor Vera Walter Wendy Yara Zoe
"""
NAMES: tuple[str, ...] = tuple(_NAMES.split())

_CITIES = """
Amsterdam Athens Bergen Berlin Bern Bogota Boston Bremen Brussels Cairo Chicago Cork Dakar
Delhi Denver Dublin Geneva Genoa Ghent Hamburg Hanoi Helsinki Houston Istanbul Kyoto Lagos Lima
Lisbon London Lyon Madrid Malmo Manila Miami Milan Munich Nairobi Naples Osaka Oslo Paris Porto
Prague Quito Riga Rome Rotterdam Seattle Seoul Seville Sofia Sydney Tokyo Toronto Turin Utrecht
Vienna Warsaw Zurich
"""
CITIES: tuple[str, ...] = tuple(_CITIES.split())

_COUNTRIES = """
France Spain Italy Germany Norway Sweden Finland Poland Greece Turkey Egypt Kenya Ghana Nigeria
India China Japan Korea Vietnam Brazil Chile Peru Mexico Canada Australia Iceland Ireland
Portugal Austria Switzerland Belgium Denmark Hungary Romania Morocco Mongolia
"""
COUNTRIES: tuple[str, ...] = tuple(_COUNTRIES.split())

LANGUAGES: tuple[str, ...] = (
    "French", "German", "Spanish", "Italian", "Dutch", "Greek", "Latin", "Polish", "Japanese",
    "Chinese", "Arabic", "Turkish", "Hindi", "Swedish",
)  # fmt: skip

_ONSETS = (
    "b", "bl", "c", "d", "dr", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "pr", "r", "s", "st",
    "t", "tr", "v", "w", "z",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
_CODAS = ("", "", "", "n", "r", "s", "l", "m", "t", "nd", "ck")

# About one copied word in six: enough that copying is learnt as such, not word by word.
_INVENTED_RATIO = 0.2
_INVENTED_WORD_RATIO = 0.5


def invented_word(rng: Random) -> str:
    """Return a word of one to three syllables that most likely is in no list."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 3)))
    )


def some_words(rng: Random, low: int, high: int) -> list[str]:
    """Return `low` to `high` different listed words."""
    return rng.sample(WORDS, rng.randint(low, high))


def copyable_words(rng: Random, low: int, high: int) -> list[str]:
    """Return `low` to `high` words to copy; some are invented, so that copying is no lookup."""
    words = some_words(rng, low, high)
    if rng.random() < _INVENTED_RATIO:
        words = [invented_word(rng) if rng.random() < _INVENTED_WORD_RATIO else w for w in words]
    return words
