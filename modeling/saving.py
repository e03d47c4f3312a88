"""Models that are published with a card of facts, and with the family's code."""

import tempfile
from pathlib import Path


class PublishesItself:
    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """From now on, save the family's code beside every model and config of it (see `GatedQwenConfig`)."""
        cls.config_class.register_for_auto_class()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
    ):
        """
        [`~PreTrainedModel.push_to_hub`], with the family's code, so that the model loads without this package, and a
        model card made from facts, unless the repository has a card. Push the tokenizer first: the card shows how to
        use what is there.

        Returns:
            `CommitInfo`: of the commit that was made.
        """
        from ..conversion.push import push_checkpoint, record_of

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            record, trained = record_of(self.name_or_path, Path(folder))
            return push_checkpoint(
                folder,
                repo_id,
                commit_message=commit_message or "Upload model",
                commit_description=commit_description,
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
                tags=tags,
                record=record,
                trained=trained,
            )
