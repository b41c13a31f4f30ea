import { useState } from "preact/hooks";
import { CopyButton } from "../ui/copy";
import { shell, toBody, toCommand, type Question } from "./question";
import type { PlanRecord } from "./types";
import { useAnswer } from "./use_answer";

const TITLES: Record<string, string> = {
  command: "Command",
  shell: "Shell",
  compose: "Compose",
  systemd: "systemd",
  k8s: "Kubernetes",
  ray: "Ray",
};

/** How to start it, by a command or by files, and how to ask the same without a browser. */
export function Launch(props: { plan: PlanRecord; question: Question; kinds: string[] }) {
  const { plan, question } = props;
  const [kind, setKind] = useState("command");
  return (
    <section class="card" aria-labelledby="launch">
      <h2 id="launch">{plan.command ? "Launch" : "Ask again"}</h2>
      {plan.command && (
        <>
          <div class="tabs" role="tablist" aria-label="Recipes">
            {["command", ...props.kinds].map((each) => (
              <button
                key={each}
                type="button"
                role="tab"
                id={`recipe-${each}`}
                aria-selected={each === kind}
                aria-controls="recipe"
                onClick={() => setKind(each)}
              >
                {TITLES[each] ?? each}
              </button>
            ))}
          </div>
          <div id="recipe" role="tabpanel" aria-labelledby={`recipe-${kind}`}>
            {kind === "command" ? <Words plan={plan} /> : <Files question={question} kind={kind} />}
          </div>
        </>
      )}
      <h3>The same plan on a command line</h3>
      <Command what="plan command" text={shell(toCommand(question))} />
    </section>
  );
}

function Words(props: { plan: PlanRecord }) {
  const { plan } = props;
  return (
    <>
      {plan.prepare.length > 0 && <Command what="prepare command" text={shell(plan.prepare)} />}
      <Command what="launch command" text={shell(plan.command!)} />
      {plan.note && <p class="note-line">{plan.note}</p>}
      {plan.best && plan.best.replicas > 1 && (
        <p class="quiet small">One of {plan.best.replicas} replicas; the files of the other tabs start all of them.</p>
      )}
    </>
  );
}

/** The files of a recipe, or why this plan has none of the kind. */
function Files(props: { question: Question; kind: string }) {
  const answer = useAnswer<{ files: Record<string, string> }>("cockpit/recipe", {
    ...toBody(props.question),
    kind: props.kind,
  });
  if (answer.stale && answer.error) return <p class="quiet">{answer.error.message}</p>;
  if (answer.value === null) return <p class="quiet">Writing …</p>;
  return (
    <div class={answer.stale ? "stale" : undefined}>
      {Object.entries(answer.value.files).map(([name, text]) => (
        <div key={name}>
          <h3>{name}</h3>
          <Command what={name} text={text} />
        </div>
      ))}
    </div>
  );
}

function Command(props: { what: string; text: string }) {
  return (
    <div class="command">
      <pre tabIndex={0} aria-label={props.what}>
        <code>{props.text}</code>
      </pre>
      <CopyButton text={props.text} what={props.what} />
    </div>
  );
}
