import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, forgetKey, hasKey } from "./api";
import { ChatView } from "./chat/view";
import { LayoutView } from "./layout/view";
import { LiveView } from "./live/view";
import { Login } from "./login";
import { CompareView } from "./plan/compare";
import { PlanView } from "./plan/view";
import { linkTo, usePlace } from "./router";
import { about, type About } from "./session";
import { Emblem } from "./ui/emblem";
import { TraceView } from "./trace/view";

const VIEWS = {
  plan: { title: "Plan", needsEngine: false },
  compare: { title: "Compare", needsEngine: false },
  live: { title: "Live", needsEngine: true },
  trace: { title: "Trace", needsEngine: true },
  chat: { title: "Chat", needsEngine: true },
  layout: { title: "Layout", needsEngine: false },
} as const;
type View = keyof typeof VIEWS;

export function App() {
  const [server, setServer] = useState<About | null>(null);
  const [locked, setLocked] = useState(false);
  const [problem, setProblem] = useState("");
  const enter = async () => {
    try {
      setServer(await about());
      setLocked(false);
      setProblem("");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) forgetKey();
      else setProblem(error.message);
      setLocked(error.status === 401);
      throw error;
    }
  };
  useEffect(() => void enter().catch(() => undefined), []);
  if (locked) return <Login enter={enter} />;
  if (server === null)
    return (
      <main>
        <h1 class="hidden-label">Phalanx</h1>
        {problem && (
          <p class="told" role="alert">
            {problem}
          </p>
        )}
      </main>
    );
  return <Cockpit server={server} />;
}

function logOut(): void {
  forgetKey();
  location.reload();
}

function Cockpit(props: { server: About }) {
  const { server } = props;
  const place = usePlace();
  const views = (Object.keys(VIEWS) as View[]).filter((view) => server.mode === "serve" || !VIEWS[view].needsEngine);
  const view = views.find((each) => each === place.view) ?? (server.mode === "serve" ? "chat" : "plan");
  const main = useRef<HTMLElement>(null);
  useEffect(() => {
    document.title = `${VIEWS[view].title} · Phalanx`;
  }, [view]);
  return (
    <>
      <a
        class="skip"
        href="#content"
        onClick={(event) => {
          event.preventDefault();
          main.current?.focus();
        }}
      >
        Skip to content
      </a>
      <header class="bar">
        <span class="brand">
          <Emblem /> Phalanx
        </span>
        <nav aria-label="Views">
          {views.map((each) => (
            <a key={each} href={linkTo(each)} aria-current={each === view ? "page" : undefined}>
              {VIEWS[each].title}
            </a>
          ))}
        </nav>
        <div class="state">
          {server.model !== null && <span class="name">{server.model}</span>}
          {server.tp !== null && <span class="tag">TP={server.tp}</span>}
          {server.mode === "studio" && <span class="tag">studio</span>}
          {hasKey() && (
            <button type="button" class="link-button" onClick={logOut}>
              Log out
            </button>
          )}
        </div>
      </header>
      <main ref={main} tabIndex={-1}>
        <h1 class="hidden-label">{VIEWS[view].title}</h1>
        {view === "plan" && <PlanView server={server} query={place.query} />}
        {view === "compare" && <CompareView query={place.query} />}
        {view === "live" && <LiveView server={server} />}
        {view === "trace" && <TraceView />}
        {view === "chat" && <ChatView server={server} />}
        {view === "layout" && <LayoutView server={server} query={place.query} />}
      </main>
    </>
  );
}
