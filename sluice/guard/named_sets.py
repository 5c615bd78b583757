"""Expressions of the platform for card numbers, keys and other data, by name. Pure."""

# The expressions avoid counted repeats where possible, because each count multiplies the states.
NAMED_SETS: dict[str, tuple[str, ...]] = {
    "card": (r"\b(?:\d[ -]?){12,18}\d\b",),
    "iban": (r"\b[A-Za-z]{2}\d{2}(?:[ -]?[A-Za-z0-9]{4}){2,7}(?:[ -]?[A-Za-z0-9]{1,3})?\b",),
    "email": (r"[\w.!#$%&'*+/=?^`{|}~-]+@[\w-]+(?:\.[\w-]+)+",),
    "phone": (
        r"(?:\+|\b00)[1-9]\d{0,2}(?:[ ./()-]{0,2}\d{2,4}){2,5}\b",
        r"(?:\(\d{3}\) ?|\b\d{3}[ .-])\d{3}[ .-]\d{4}\b",
    ),
    "cloud_key": (
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",  # Amazon
        r"\bAIza[\w-]{35}",  # Google
        r"\bgh[opsur]_[A-Za-z0-9]{36,}",  # GitHub
        r"\bgithub_pat_[A-Za-z0-9_]{22,}",
        r"\bglpat-[\w-]{20,}",  # GitLab
        r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
        r"\bsk-[\w-]{20,}",  # OpenAI, Anthropic and others
        r"\b[rs]k_live_[A-Za-z0-9]{16,}",  # Stripe
        r"\beyJ[\w-]+\.eyJ[\w-]+\.[\w-]+",  # a JSON web token
        r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----[A-Za-z0-9+/=\s]*"
        r"(?:-----END [A-Z0-9 ]{0,30}PRIVATE KEY-----)?",
    ),
}
# Names of the checks for the named sets that have one.
CHECKED_SETS = {"card": "card", "iban": "iban"}
