"""The tree of settings and where their values come from."""


class SettingsError(Exception):
    """The settings cannot be used; the message names each field and what is wrong with it."""


#: Address and key for commands that ask a gateway. They are no settings.
URL_VARIABLE = "VLM_URL"
KEY_VARIABLE = "VLM_API_KEY"
