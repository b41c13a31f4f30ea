import type { Catalog, Excluded } from "./types";

/** Every reason once, with the runtimes, formats and degrees that it is about. */
export function Refusals(props: { excluded: Excluded[]; catalog: Catalog }) {
  const reasons = new Map<string, Excluded[]>();
  for (const each of props.excluded) {
    const reason = `${each.found} ${each.fix}`;
    reasons.set(reason, [...(reasons.get(reason) ?? []), each]);
  }
  if (reasons.size === 0) return null;
  const title = (name: string) => props.catalog.engines.find((each) => each.name === name)?.title ?? name;
  const all = (cases: Excluded[], of: (each: Excluded) => string | number) => [...new Set(cases.map(of))].join(", ");
  return (
    <section class="card" aria-labelledby="refusals">
      <h2 id="refusals">What does not work, and why</h2>
      <ul class="refusals">
        {[...reasons.values()].map((cases) => (
          <li key={cases[0]!.found}>
            <span class="cases">
              {all(cases, (each) => title(each.engine))} {all(cases, (each) => each.weight_format)} TP={all(cases, (each) => each.tp)}
            </span>
            <span>
              {cases[0]!.found} <span class="quiet">{cases[0]!.fix}</span>
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}
