import { CopyButton } from "../ui/copy";
import { shell, toCommand, type Question } from "./question";
import type { PlanRecord } from "./types";

/** How to start it, how to ask the same without a browser, and a link to this page. */
export function Launch(props: { plan: PlanRecord; question: Question }) {
  const { plan, question } = props;
  return (
    <section class="card" aria-labelledby="launch">
      <h2 id="launch">{plan.command ? "Launch" : "Ask again"}</h2>
      {plan.command && <Command what="launch command" text={shell(plan.command)} />}
      {plan.best && plan.best.replicas > 1 && (
        <p class="quiet small">
          One of {plan.best.replicas} replicas; each wants its own GPUs and port. Files for all of them: add --recipe shell,
          compose, systemd or k8s to the command below.
        </p>
      )}
      <h3>The same plan on a command line</h3>
      <Command what="plan command" text={shell(toCommand(question))} />
    </section>
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
