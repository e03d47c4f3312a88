"""Configs that are saved with the family's code, if asked."""


class SavesItsCode:
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
