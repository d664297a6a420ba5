"""Refuse prompts and answers that a moderation server flags: `VLM_GATEWAY__HOOKS=moderation:Moderation`.

MODERATION_URL is an endpoint with OpenAI's moderation API, such as http://127.0.0.1:9000/v1/moderations.
"""

import os

import httpx


class Moderation:
    def __init__(self):
        self.url = os.environ["MODERATION_URL"]
        self.client = httpx.AsyncClient()

    async def before(self, call):
        await self.check(call, "The prompt is against the rules of this server.")

    async def after(self, answer):
        await self.check(answer, "The answer is against the rules of this server.")

    async def check(self, call, refusal):
        texts = [message.text for message in call.messages if message.text]
        if not texts:
            return
        response = await self.client.post(self.url, json={"input": texts})
        response.raise_for_status()
        if any(result["flagged"] for result in response.json()["results"]):
            raise call.refuse(refusal, code="content_refused")
