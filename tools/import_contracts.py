"""A rule for import-linter that its own contract types cannot express."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from importlinter import Contract, ContractCheck, fields, output

if TYPE_CHECKING:
    from grimp import ImportGraph
    from importlinter.domain.imports import Module


class OnlyContract(Contract):
    """Of one package, the source modules import the listed modules themselves and nothing else.

    It is an allow-list of exact names, so a module that is added to the package tomorrow, or one whose name
    starts with an underscore, is refused without being named here. What the listed modules import in turn is
    their own business.

    Options: ``source_modules`` (with all that is below them), ``package``, ``allowed_modules``.
    """

    type_name = "only"

    source_modules = fields.ListField(subfield=fields.ModuleField())
    package = fields.ModuleField()
    allowed_modules = fields.ListField(subfield=fields.ModuleField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        package = cast("Module", self.package).name
        allowed = {module.name for module in cast("list[Module]", self.allowed_modules)}
        refused: list[str] = []
        for source in cast("list[Module]", self.source_modules):
            own = {source.name, *graph.find_descendants(source.name)}
            for importer in sorted(own):
                for imported in sorted(graph.find_modules_directly_imported_by(importer) - own - allowed):
                    if imported == package or imported.startswith(f"{package}."):
                        details = graph.get_import_details(importer=importer, imported=imported)
                        lines = ", ".join(str(detail["line_number"]) for detail in details)
                        refused.append(f"{importer} imports {imported} (line {lines})")
        return ContractCheck(kept=not refused, metadata={"refused": refused, "allowed": sorted(allowed)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["refused"]:
            output.print_error(f"- {line}")
        output.new_line()
        output.print(f"Allowed: {', '.join(check.metadata['allowed'])}.")
        output.new_line()
