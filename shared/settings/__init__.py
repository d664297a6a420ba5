"""The tree of settings, and its sources."""


class SettingsError(Exception):
    """Invalid settings; the message names each field and the reason."""


#: Address and key for commands that call a gateway. Not settings.
URL_VARIABLE = "VLM_URL"
KEY_VARIABLE = "VLM_API_KEY"
