"""What the config does in the package alone: it is saved with the family's code, if asked, and known to PEFT."""

import sys


class SavesItsCode:
    def to_dict(self):
        # PEFT asks the config just before it looks the family's default targets up, however late it was imported.
        register_peft_targets()
        return super().to_dict()

    def save_pretrained(self, save_directory, *args, **kwargs):
        """
        [`~PreTrainedConfig.save_pretrained`]. After `register_for_auto_class()`, of a config or a model class, the
        family's code is saved too, as flat files that transformers runs under `trust_remote_code=True`; so it is
        beside every model that is saved, checkpoints of a `Trainer` among them.
        """
        from ..conversion.remote_code import AUTO_MAP, check_place, write_remote_code

        asked = type(self)._auto_class is not None
        # A name without the file that it names would keep others from loading what is saved.
        self.__dict__.pop("auto_map", None)
        if not asked:
            return super().save_pretrained(save_directory, *args, **kwargs)
        check_place(save_directory)
        self.auto_map = dict(AUTO_MAP)
        self._auto_class = None  # or transformers would look for files beside this package's own
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            del self._auto_class
            del self.auto_map
        write_remote_code(save_directory)


def register_peft_targets() -> None:
    """Give PEFT, where it is imported, the default `target_modules` of Qwen3 for this family."""
    constants = sys.modules.get("peft.utils.constants")
    for name, targets in vars(constants).items() if constants else ():
        if name.endswith("_TARGET_MODULES_MAPPING") and "qwen3" in targets:
            targets.setdefault("gated_qwen", targets["qwen3"])
