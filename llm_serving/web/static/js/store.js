// Keeps conversations in the browser (IndexedDB), settings in the local storage, and the API key in the tab only.

const MAX_CONVERSATIONS = 500; // the oldest conversation beyond this number is removed
const STORE = "conversations";
const SETTINGS = "llm-serving.settings";
const KEY = "llm-serving.key";
const channel = "BroadcastChannel" in self ? new BroadcastChannel("llm-serving.conversations") : null;
let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("llm-serving", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function transaction(mode, action) {
  const base = await database();
  return new Promise((resolve, reject) => {
    const begun = base.transaction(STORE, mode);
    const request = action(begun.objectStore(STORE));
    begun.oncomplete = () => resolve(request.result);
    begun.onerror = begun.onabort = () => reject(begun.error);
  });
}

/** Returns all conversations, the last changed first. Removes those beyond the limit. */
export async function loadConversations() {
  const found = await transaction("readonly", (store) => store.getAll());
  found.sort((a, b) => b.changed - a.changed);
  for (const old of found.splice(MAX_CONVERSATIONS)) await transaction("readwrite", (store) => store.delete(old.id));
  return found;
}

export async function saveConversation(conversation) {
  await transaction("readwrite", (store) => store.put(conversation));
  channel?.postMessage("changed");
}

export async function removeConversation(id) {
  await transaction("readwrite", (store) => store.delete(id));
  channel?.postMessage("changed");
}

/** Calls `action` when another tab has changed a conversation. */
export function onOtherTab(action) {
  channel?.addEventListener("message", action);
}

export function loadSettings() {
  try { return JSON.parse(localStorage.getItem(SETTINGS)) ?? {}; } catch { return {}; }
}

export function saveSettings(settings) {
  try { localStorage.setItem(SETTINGS, JSON.stringify(settings)); } catch { /* a private window stores nothing: the settings last until a reload */ }
}

export function apiKey() {
  try { return sessionStorage.getItem(KEY) ?? ""; } catch { return ""; }
}

export function setApiKey(key) {
  try { sessionStorage.setItem(KEY, key); } catch { /* the key is then not stored */ }
}
