import { millis, money, number } from "../format";
import type { Candidate, Catalog } from "./types";

export interface Ranked {
  engines: Candidate[];
  /** Why others have no place, by their names. */
  missing: Record<string, string>;
}

/** The best of every runtime on this machine: a row each, whether it runs or not. */
export function Ranking(props: { ranked: Ranked | null; catalog: Catalog; choose: (engine: string) => void }) {
  const { ranked, catalog } = props;
  const order = ranked?.engines.map((each) => each.engine) ?? [];
  const names = [...order, ...catalog.engines.map((each) => each.name).filter((name) => !order.includes(name))];
  return (
    <section class="card" aria-labelledby="ranking">
      <h2 id="ranking">
        Engines side by side <span class="quiet small">the best of each, goals first, then tokens a GPU</span>
      </h2>
      <div class="table-scroll" role="region" aria-labelledby="ranking" tabIndex={0}>
        <table class="ranking">
          <thead>
            <tr>
              {["Engine", "Format", "TP", "TTFT", "TPOT", "tok/s per GPU", "USD per M"].map((title) => (
                <th scope="col" key={title}>
                  {title}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {names.map((name) => (
              <Row
                key={name}
                title={catalog.engines.find((each) => each.name === name)?.title ?? name}
                found={ranked?.engines.find((each) => each.engine === name)}
                why={ranked?.missing[name]}
                choose={() => props.choose(name)}
              />
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Row(props: { title: string; found?: Candidate; why?: string; choose: () => void }) {
  const { found } = props;
  return (
    <tr>
      <th scope="row">
        <button type="button" class="link" onClick={props.choose}>
          {props.title}
        </button>
      </th>
      {found ? (
        <>
          <td>{found.weight_format}</td>
          <td>
            {found.tp}
            {found.expert_parallel ? " + EP" : ""} × {found.replicas}
          </td>
          <td>{millis(found.ttft_ms.mid)}</td>
          <td>{millis(found.tpot_ms.mid)}</td>
          <td>{number(found.tokens_per_s_per_gpu)}</td>
          <td>{found.usd_per_million_tokens === null ? "–" : money(found.usd_per_million_tokens)}</td>
        </>
      ) : (
        <td colSpan={6} class="why" title={props.why}>
          {props.why ?? "–"}
        </td>
      )}
    </tr>
  );
}
