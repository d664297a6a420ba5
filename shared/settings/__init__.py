"""The tree of settings and where their values come from."""


class SettingsError(Exception):
    """The settings cannot be used; the message names each field and what is wrong with it."""
