import type { DealtName, Split } from "./data";
import { bytes, span } from "./units";

const TITLES: Record<DealtName, string> = {
  query_heads: "Query heads",
  kv_heads: "KV heads",
  state_heads: "State heads",
  ffn: "FFN columns",
  expert_ffn: "Columns of each expert",
  shared_ffn: "Shared expert",
  vocab: "Vocabulary rows",
};

/** What every rank holds, in numbers. */
export function Holdings(props: { split: Split; rank: number; choose: (rank: number) => void }) {
  const { split } = props;
  const names = (Object.keys(TITLES) as DealtName[]).filter((name) => split.dealt[name]);
  return (
    <section class="card" aria-labelledby="holdings">
      <h2 id="holdings">What every rank holds</h2>
      {split.replicas > 1 && (
        <ul class="replicas" aria-label="Replicas">
          {Array.from({ length: split.replicas }, (_, replica) => (
            <li key={replica}>
              <strong>Replica {replica}</strong> GPU {span([replica * split.tp, (replica + 1) * split.tp])}
              {replica > 0 && <span class="quiet"> the same shares</span>}
            </li>
          ))}
          {split.idle > 0 && <li class="quiet">{split.idle} GPUs idle</li>}
        </ul>
      )}
      <div class="table-scroll" tabIndex={0} role="group" aria-label="What every rank holds, table">
        <table>
          <thead>
            <tr>
              <th scope="col">Rank</th>
              {names.map((name) => (
                <th key={name} scope="col">
                  {TITLES[name]} <Marks split={split} name={name} />
                </th>
              ))}
              <th scope="col">Weights</th>
              <th scope="col">Left for KV</th>
              <th scope="col">KV a token</th>
            </tr>
          </thead>
          <tbody>
            {split.ranks.map((each) => (
              <tr key={each.rank} data-rank={each.rank} class={each.rank === props.rank ? "chosen" : ""}>
                <th scope="row">
                  <button type="button" class="link-button" onClick={() => props.choose(each.rank)}>
                    Rank {each.rank}
                  </button>
                </th>
                {names.map((name) => {
                  const share = split.dealt[name]!.shares[each.rank]!;
                  return (
                    <td key={name} data-dealt={name}>
                      <strong>{(share[1] - share[0]).toLocaleString("en-US")}</strong>{" "}
                      <span class="quiet">({span(share)})</span>
                    </td>
                  );
                })}
                <td>{bytes(each.weight_bytes)}</td>
                <td>{each.room_bytes > 0 ? bytes(each.room_bytes) : <span class="tag bad">{bytes(-each.room_bytes)} short</span>}</td>
                <td>{bytes(each.kv_bytes_per_token)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="small quiet">
        Every rank holds its part of all {split.model.layers} layers. No unit is cut; dealt are{" "}
        {names.map((name) => `${TITLES[name].replace(/^[A-Z](?![A-Z])/, (letter) => letter.toLowerCase())} by ${split.dealt[name]!.unit}`).join(", ")}.
      </p>
    </section>
  );
}

function Marks(props: { split: Split; name: DealtName }) {
  const dealt = props.split.dealt[props.name]!;
  return (
    <>
      {dealt.uneven && <span class="tag warn">uneven</span>}
      {dealt.replicated && <span class="tag">copied</span>}
    </>
  );
}
