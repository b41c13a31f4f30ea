import { useState } from "preact/hooks";
import { ApiError, keepKey, useKey } from "./api";
import { TextField } from "./ui/field";

/** Asks for the server's API key. It is kept until the tab is closed. */
export function Login(props: { enter: () => Promise<void> }) {
  const [given, setGiven] = useState("");
  const [problem, setProblem] = useState("");
  const submit = async (event: Event) => {
    event.preventDefault();
    useKey(given.trim());
    try {
      await props.enter();
      keepKey();
    } catch (error) {
      setProblem(error instanceof ApiError && error.status === 401 ? "This key is wrong." : String(error));
    }
  };
  return (
    <main>
      <form class="card stack login" onSubmit={submit}>
        <h1>Phalanx</h1>
        <TextField
          label="API key"
          value={given}
          onInput={setGiven}
          hint={problem || "Kept until this tab is closed, or you log out."}
          wrong={problem !== ""}
          input={{ type: "password", autoFocus: true }}
        />
        <button class="button primary" disabled={!given.trim()}>
          Log in
        </button>
      </form>
    </main>
  );
}
