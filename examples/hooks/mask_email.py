"""Mask e-mail addresses in prompts: `VLM_GATEWAY__HOOKS=mask_email:MaskEmail`."""

import re

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")


class MaskEmail:
    async def before(self, call):
        for message in call.messages:
            message.text = _EMAIL.sub("[email]", message.text)
